"""How clients' work is run: one after the other, several at once, in processes of their own, or
whichever of these is measured to be the fastest; with the same numbers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Annotated, Any, Literal, Protocol

import torch
from annotated_types import Ge, Gt

from .params import Params
from .processes import Processes, Work, can_fork, cores
from .task import Precision
from .vectorised import Growing, Vectorised
from .work import AnyItem, Item

ExecutorName = Literal["sequential", "vectorised", "processes"]

_AT_ONCE = 5  # clients, where nothing else is said or found out
_PATIENCE = 1.0  # seconds of work before processes are worth their start


@dataclass(frozen=True)
class EngineConfig:
    """How clients are run. Executors give the same numbers, up to rounding."""

    executor: Literal["auto", "sequential", "vectorised", "processes"] = "auto"
    # vectorised: clients trained at once; None: 5 on a CPU or a rank, as many as pays on a GPU
    clients_per_step: Annotated[int, Gt(0)] | None = None
    processes: Annotated[int, Gt(0)] | None = None  # at most; None: one a core
    precision: Precision = "fp32"  # bf16: autocast; parameters stay float32
    device: str = "auto"
    upload_memory_mb: Annotated[float, Gt(0)] = 2000.0  # a cohort's uploads beyond it go to disk
    # for what a method works out once an example, if all examples' results fit; 0: never
    cache_mb: Annotated[float, Ge(0)] = 2000.0


class Executor(Protocol):
    """What runs work: as it is called in a log, and how many processes it has at most."""

    @property
    def name(self) -> str | None: ...
    @property
    def processes(self) -> int: ...
    @property
    def at_once(self) -> int:
        """How many items are worked on at a time."""

    def map(
        self, name: str, server: Params, items: Iterable[AnyItem]
    ) -> Iterator[tuple[AnyItem, Any]]:
        """(item, result of the work of that name), in any order. Tensors of a result are valid
        until the next one is asked for."""

    def close(self) -> None: ...


def executor_for(
    engine: EngineConfig,
    works: Mapping[str, Work],
    device: torch.device,
    cohort_size: int,
    chosen: str | None = None,
) -> Executor:
    """The configured executor; for ``auto`` the one that was ``chosen`` before, or else one that
    chooses.

    On a CPU ``auto`` gives every client one thread, here or in a process of its own: the same bits
    either way. It doesn't where cohorts are so small that most cores would be idle.
    """
    most = engine.processes or cores()
    if engine.executor != "auto":
        return _configured(engine.executor, engine, works, most, device, chosen)
    if device.type == "cpu":
        if min(most, cohort_size) == 1 or 2 * cohort_size < most or not can_fork():
            return Sequential(works)
        return Auto(Sequential(works, threads=1), Processes(works, most), _PATIENCE, chosen)
    vectorised = _configured("vectorised", engine, works, most, device, chosen)
    return Auto(Sequential(works), vectorised, 0.0, chosen)


def share_executor(
    engine: EngineConfig, works: Mapping[str, Work], device: torch.device, neighbours: int
) -> Executor:
    """What one of several ranks runs its share by, ``neighbours`` of them on this host. The same on
    all: ``auto`` doesn't choose, but is ``sequential`` on a CPU, with one thread, since every core
    has its rank; and ``vectorised`` on a GPU."""
    if engine.executor == "auto" and device.type == "cpu":
        return Sequential(works, threads=1)
    name = "vectorised" if engine.executor == "auto" else engine.executor
    # a rank is dealt as many clients as it has at once, so that this can't grow
    fixed = replace(engine, clients_per_step=engine.clients_per_step or _AT_ONCE)
    most = engine.processes or max(1, cores() // neighbours)
    return _configured(name, fixed, works, most, device)


def _configured(
    name: ExecutorName,
    engine: EngineConfig,
    works: Mapping[str, Work],
    most: int,
    device: torch.device,
    chosen: str | None = None,
) -> Executor:
    if name == "sequential":
        return Sequential(works)
    if name == "processes":
        return Processes(works, most)
    if engine.clients_per_step is not None or device.type == "cpu":
        return Vectorised(works, engine.clients_per_step or _AT_ONCE)
    size = (chosen or "").removeprefix("vectorised-")
    if size.isdecimal():
        return Vectorised(works, Growing(int(size), settled=True))
    return Vectorised(works, Growing())


class Sequential:
    """One item after the other, with ``threads`` instead of all."""

    name = "sequential"
    processes = 1
    at_once = 1

    def __init__(self, works: Mapping[str, Work], threads: int | None = None) -> None:
        self._works = works
        self._threads = threads

    def map(
        self, name: str, server: Params, items: Iterable[AnyItem]
    ) -> Iterator[tuple[AnyItem, Any]]:
        for item in items:
            yield item, self._one(name, server, item)

    def _one(self, name: str, server: Params, item: Item) -> Any:
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads or before)
        try:
            return self._works[name].one(server, item)
        finally:
            torch.set_num_threads(before)

    def close(self) -> None:
        """Nothing to be done."""


class Auto:
    """One executor, ``first``, until it has worked for ``patience`` seconds; ``second`` with what
    is left of that round; from then on the one that was faster."""

    def __init__(
        self, first: Executor, second: Executor, patience: float, chosen: str | None = None
    ) -> None:
        self._first, self._second, self._patience = first, second, patience
        known = (executor for executor in (first, second) if executor.name == chosen)
        self._chosen: Executor | None = next(known, None)
        self._running = self._chosen or first
        self._paces: dict[tuple[Executor, str], _Pace] = {}

    @property
    def name(self) -> str | None:
        """None while nothing is chosen."""
        return self._chosen.name if self._chosen else None

    @property
    def processes(self) -> int:
        return self._running.processes

    @property
    def at_once(self) -> int:
        return self._running.at_once

    def map(
        self, name: str, server: Params, items: Iterable[AnyItem]
    ) -> Iterator[tuple[AnyItem, Any]]:
        if self._chosen is not None:
            yield from self._chosen.map(name, server, items)
            return
        items = iter(items)
        yield from self._timed(self._first, name, server, self._at_first(name, items))
        for item in items:  # at most once: it takes all
            self._running = self._second
            yield from self._timed(self._second, name, server, chain([item], items))
            self._choose(name)

    def _at_first(self, name: str, items: Iterator[AnyItem]) -> Iterator[AnyItem]:
        """``items`` until enough of the work is known."""
        while not self._pace(self._first, name).size or self._spent() < self._patience:
            if (item := next(items, None)) is None:
                return
            yield item

    def _spent(self) -> float:
        """Seconds, all works together."""
        return sum(pace.seconds for pace in self._paces.values())

    def _timed(
        self, executor: Executor, name: str, server: Params, items: Iterator[AnyItem]
    ) -> Iterator[tuple[AnyItem, Any]]:
        pace, before = self._pace(executor, name), time.perf_counter()
        for item, result in executor.map(name, server, items):
            now = time.perf_counter()
            pace.add(item.size, now - before)
            before = now
            yield item, result

    def _pace(self, executor: Executor, name: str) -> _Pace:
        return self._paces.setdefault((executor, name), _Pace(executor.at_once))

    def _choose(self, name: str) -> None:
        first, second = (self._pace(which, name) for which in (self._first, self._second))
        slower = bool(second.size) and second.seconds / second.size > first.seconds / first.size
        self._chosen = self._running = self._first if slower else self._second
        if slower:
            self._second.close()

    def close(self) -> None:
        self._first.close()
        self._second.close()


@dataclass
class _Pace:
    """The time that work takes, without that of the first items: they start things up."""

    left_out: int
    seconds: float = 0.0
    size: int = 0

    def add(self, size: int, seconds: float) -> None:
        if self.left_out:
            self.left_out -= 1
        else:
            self.seconds += seconds
            self.size += size
