"""Which executor runs the clients: the configured one, or one that is found by measuring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from ..config import EngineConfig
from .auto import Auto
from .captured import cuda_graphs
from .processes import Processes, can_fork, cores
from .sequential import Sequential
from .vectorised import AdaptiveChunk, Vectorised
from .work import Executor, Work

_DEFAULT_CONCURRENCY = 5  # clients, where nothing else is said or found out

_PATIENCE = 1.0  # seconds of work before processes are worth their start


def executor_for(
    engine: EngineConfig,
    works: Mapping[str, Work],
    device: torch.device,
    cohort_size: int,
    chosen: str | None = None,
) -> Executor:
    """The configured executor; for ``auto`` the one that was ``chosen`` before, or else one that
    chooses: on a GPU how many clients it trains at once. On a CPU it gives every client one thread,
    here or in a process of its own, and so the same bits; but not where cohorts are so small that
    most cores would be idle."""
    most = engine.processes or cores()
    if engine.executor != "auto":
        return _configured(engine.executor, engine, works, most, device, chosen)
    if device.type == "cpu":
        if at_once(engine, cohort_size) == 1:
            return Sequential(works)
        return Auto(Sequential(works, threads=1), Processes(works, most), _PATIENCE, chosen)
    return _configured("vectorised", engine, works, most, device, chosen)


def at_once(engine: EngineConfig, cohort_size: int) -> int:
    """How many clients a CPU trains at a time, at most, in processes of their own."""
    most = min(engine.processes or cores(), cohort_size)
    if engine.executor == "auto" and 2 * cohort_size < (engine.processes or cores()):
        return 1
    return most if engine.executor in ("auto", "processes") and can_fork() else 1


def share_executor(
    engine: EngineConfig, works: Mapping[str, Work], device: torch.device, local_size: int
) -> Executor:
    """What one of several ranks runs its share by, ``local_size`` of them on this host. The same on
    all: ``auto`` doesn't choose, but is ``sequential`` on a CPU, with one thread, since every core
    has its rank; and ``vectorised`` on a GPU."""
    if engine.executor == "auto" and device.type == "cpu":
        return Sequential(works, threads=1)
    name = "vectorised" if engine.executor == "auto" else engine.executor
    # a rank is dealt as many clients as it has at once, so that this can't grow
    fixed = replace(engine, clients_per_step=engine.clients_per_step or _DEFAULT_CONCURRENCY)
    most = engine.processes or max(1, cores() // local_size)
    return _configured(name, fixed, works, most, device)


def _configured(
    name: str,
    engine: EngineConfig,
    works: Mapping[str, Work],
    most: int,
    device: torch.device,
    chosen: str | None = None,
) -> Executor:
    if name == "processes":
        return Processes(works, most)
    if device.type == "cpu":
        if name == "sequential":
            return Sequential(works)
        return Vectorised(works, engine.clients_per_step or _DEFAULT_CONCURRENCY)
    capture = cuda_graphs(device) if engine.capture else None
    if name == "sequential" or engine.clients_per_step is not None:
        fixed = 1 if name == "sequential" else engine.clients_per_step
        return Vectorised(works, fixed or 1, capture)
    size = (chosen or "").removeprefix("vectorised-")
    known = AdaptiveChunk(int(size), settled=True) if size.isdecimal() else AdaptiveChunk()
    return Vectorised(works, known, capture)
