"""Ranks forked from the test's own process: real processes and connections, no new imports."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from torch.distributed import TCPStore


@contextmanager
def ranks(size: int, work: Callable[[], object], said: Path) -> Iterator[list[BaseProcess]]:
    """``size`` processes that call ``work`` and exit with what it returns; their standard error
    goes to ``said``. Those that are left in the end are killed."""
    # as torchrun's agent has it: it is there for longer than any rank
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def rank(number: int) -> None:
        os.environ |= {
            "RANK": str(number), "LOCAL_RANK": str(number),
            "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }  # fmt: skip
        os.dup2(os.open(said, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
        sys.stderr = os.fdopen(2, "w", buffering=1)
        torch.set_num_threads(1)
        sys.exit(work() or 0)  # type: ignore[call-overload]

    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=rank, args=(number,)) for number in range(size)]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def ended(processes: list[BaseProcess], seconds: float = 120) -> list[int | None]:
    """The exit codes; None: it is still there."""
    for process in processes:
        process.join(seconds)
    return [process.exitcode for process in processes]


def run(size: int, work: Callable[[], object], said: Path) -> list[int | None]:
    """`ranks`, until they have ended."""
    with ranks(size, work, said) as processes:
        return ended(processes)
