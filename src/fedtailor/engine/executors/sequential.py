"""One client after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from ...params import Params
from .work import AnyItem, Executor, Work


class Sequential(Executor):
    """One item after the other, with ``threads`` instead of all."""

    name = "sequential"

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
