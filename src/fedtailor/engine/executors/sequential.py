"""One client after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from ...params import Params
from .work import AnyItem, Work


class Sequential:
    """One item after the other, with ``threads`` instead of all."""

    name = "sequential"
    processes = 1
    concurrency = 1

    def __init__(self, works: Mapping[str, Work], threads: int | None = None) -> None:
        self._works = works
        self._threads = threads

    def map(
        self, name: str, server: Params, items: Iterable[AnyItem]
    ) -> Iterator[tuple[AnyItem, Any]]:
        for item in items:
            before = torch.get_num_threads()
            torch.set_num_threads(self._threads or before)
            try:
                result = self._works[name].one(server, item)
            finally:
                torch.set_num_threads(before)
            yield item, result

    def close(self) -> None:
        """Nothing to be done."""
