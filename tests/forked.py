"""Ranks: real processes and connections; and a small experiment that they run.

They are forked from one process that has imported what they need and does nothing else. The tests'
own process has threads by then, and a lock that one of them holds would stay locked in a fork.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

import cloudpickle
import torch
from torch import Tensor
from torch.distributed import TCPStore

import fedtailor as ft
from fedtailor import methods
from fedtailor.cli import main
from fedtailor.engine.executors.process_group import init_process_group
from fedtailor.optim import ClientContext
from fedtailor.params import Batch, Params
from fedtailor.task.task import Task

_IMPORTED = (  # by a run, once it needs them
    "fedtailor.runs.run", "fedtailor.report.page", "fedtailor.models.load", "fedtailor.runs.ranks",
    "fedtailor.engine.executors.ranks", "transformers.models.auto", "sklearn.datasets",
)  # fmt: skip


@contextmanager
def ranks(size: int, work: Callable[[], object], said: Path) -> Iterator[list[BaseProcess]]:
    """``size`` processes that call ``work`` and exit with what it returns; their standard error
    goes to ``said``. Those that are left in the end are killed."""
    # as torchrun's agent has it: it is there for longer than any rank
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = dict(os.environ) | {
        "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "tests.small", *_IMPORTED])
    processes: list[BaseProcess] = []
    for number in map(str, range(size)):
        environment = common | {"RANK": number, "LOCAL_RANK": number}
        arguments = (cloudpickle.dumps(work), environment, said)
        processes.append(context.Process(target=_rank, args=arguments))
    with warnings.catch_warnings():  # nothing here is tracked, so its end does no harm
        warnings.filterwarnings("ignore", "resource_tracker: process died")
        for process in processes:
            process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def _rank(work: bytes, environment: dict[str, str], said: Path) -> None:
    """What one rank does."""
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(os.open(said, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    torch.set_num_threads(1)
    sys.exit(cloudpickle.loads(work)() or 0)


def ended(processes: list[BaseProcess], seconds: float = 120) -> list[int | None]:
    """The exit codes; None: it is still there."""
    for process in processes:
        process.join(seconds)
    return [process.exitcode for process in processes]


def run(size: int, work: Callable[[], object], said: Path) -> list[int | None]:
    """`ranks`, until they have ended."""
    with ranks(size, work, said) as processes:
        return ended(processes)


FILE = """
rounds = 3
data = {name = "digits"}
split = {scheme = "dirichlet", clients = 6, alpha = 0.5, min_examples = 5}
model = {name = "lenet", width = 0.25, image_size = 16, pretrained = false}
local = {batch_size = 16, steps = 2}
[methods.fedper]
"""
GOES_ON = "the same command goes on after the last committed round"
_SKIP = {"timings.jsonl", "commit.json", "environment.json", ".lock", "report.html", "run.log"}


def contents(out: Path) -> dict[str, bytes]:
    """Every file that depends on the experiment alone."""
    paths = [p for p in out.rglob("*") if p.is_file() and p.name not in _SKIP]
    return {str(p.relative_to(out)): p.read_bytes() for p in paths}


def _spoilt(spoil: Callable[[], None], rank: int) -> type[ft.FedPer]:
    """FedPer, and what happens to a rank at a client of the second round."""

    class Spoilt(ft.FedPer):
        def local(
            self, task: Task, state: Params, steps: Sequence[Batch], context: ClientContext
        ) -> tuple[Params, Tensor]:
            if context.round == 2 and os.environ["RANK"] == str(rank):
                spoil()
            return super().local(task, state, steps, context)

    return Spoilt


def command(
    file: Path, *more: str, spoil: Callable[[], None] | None = None, rank: int = 1
) -> Callable[[], int]:
    """The command line, as a rank has it."""

    def work() -> int:
        if spoil is not None:
            methods.METHODS["fedper"] = _spoilt(spoil, rank)
        return main(["run", str(file), "--out", str(file.with_suffix("")), *more])

    return work


def go(size: int, file: Path) -> Path:
    """Run the file's experiment to its end."""

    def work() -> None:
        with init_process_group() as group:
            ft.run(ft.load(file), file.with_suffix(""), group=group)

    said = file.with_suffix(".txt")
    assert run(size, work, said) == [0] * size, said.read_text()
    return file.with_suffix("")
