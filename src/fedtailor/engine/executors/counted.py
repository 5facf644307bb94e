"""An executor that says how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ...params import Params
from .work import AnyItem, Executor


@dataclass(frozen=True)
class Counted:
    """``inner``, which calls ``on_result(work, done)`` after each result: the work's name, and how
    many of its items are done."""

    inner: Executor
    on_result: Callable[[str, int], None]

    @property
    def name(self) -> str | None:
        return self.inner.name

    @property
    def processes(self) -> int:
        return self.inner.processes

    @property
    def concurrency(self) -> int:
        return self.inner.concurrency

    def map(
        self, name: str, server: Params, items: Iterable[AnyItem]
    ) -> Iterator[tuple[AnyItem, Any]]:
        for done, result in enumerate(self.inner.map(name, server, items), start=1):
            self.on_result(name, done)
            yield result

    def close(self) -> None:
        self.inner.close()
