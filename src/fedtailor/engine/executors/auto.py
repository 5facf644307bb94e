"""The faster of two executors, found by measuring."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ...params import Params
from .work import AnyItem, Executor


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
        self._paces: dict[tuple[Executor, str], Throughput] = {}

    @property
    def name(self) -> str | None:
        """None while nothing is chosen."""
        return self._chosen.name if self._chosen else None

    @property
    def processes(self) -> int:
        return self._running.processes

    @property
    def concurrency(self) -> int:
        return self._running.concurrency

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
        pace = self._pace(self._first, name)
        while not pace.size or sum(p.seconds for p in self._paces.values()) < self._patience:
            if (item := next(items, None)) is None:
                return
            yield item

    def _timed(
        self, executor: Executor, name: str, server: Params, items: Iterator[AnyItem]
    ) -> Iterator[tuple[AnyItem, Any]]:
        pace, before = self._pace(executor, name), time.perf_counter()
        for item, result in executor.map(name, server, items):
            now = time.perf_counter()
            pace.add(item.size, now - before)
            before = now
            yield item, result

    def _pace(self, executor: Executor, name: str) -> Throughput:
        return self._paces.setdefault((executor, name), Throughput(executor.concurrency))

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
class Throughput:
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
