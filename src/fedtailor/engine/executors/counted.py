"""An executor that says how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ...params import Params
from .work import AnyItem, Executor


class Counted:
    """``inner``, which calls ``on_result(work, done)`` after each result: the work's name, and how
    many of its items are done."""

    def __init__(self, inner: Executor, on_result: Callable[[str, int], None]) -> None:
        self._inner = inner
        self._on_result = on_result

    @property
    def name(self) -> str | None:
        return self._inner.name

    @property
    def processes(self) -> int:
        return self._inner.processes

    @property
    def concurrency(self) -> int:
        return self._inner.concurrency

    def map(
        self, name: str, server: Params, items: Iterable[AnyItem]
    ) -> Iterator[tuple[AnyItem, Any]]:
        for done, result in enumerate(self._inner.map(name, server, items), start=1):
            self._on_result(name, done)
            yield result

    def close(self) -> None:
        self._inner.close()
