"""A cohort's uploads, stacked, in memory or memory-mapped."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from .params import Params


class UploadStack:
    """A cohort's uploads, stacked ``[c, ...]``; memory-mapped in ``folder`` if beyond ``limit``
    bytes."""

    def __init__(self, cohort_size: int, limit: float, folder: str) -> None:
        self._size = cohort_size
        self._limit = limit
        self._folder = Path(folder)
        self.params: Params = {}

    def put(self, position: int, upload: Params) -> None:
        """Set row ``position``."""
        if not self.params:
            nbytes = self._size * sum(v.numel() * v.element_size() for v in upload.values())
            on_disk = nbytes > self._limit
            for name, value in upload.items():
                self.params[name] = self._allocate(len(self.params), value, on_disk)
        for name, value in upload.items():
            self.params[name][position].copy_(value)

    def keep(self, rows: Tensor) -> None:
        """Leave out all but these rows, ascending int64 ``[m]``: moved up where they lie, so that
        nothing is copied to memory."""
        for name, value in self.params.items():
            for at, index in enumerate(rows.tolist()):
                if at != index:
                    value[at].copy_(value[index])
            self.params[name] = value[: len(rows)]

    def _allocate(self, number: int, like: Tensor, on_disk: bool) -> Tensor:
        shape = (self._size, *like.shape)
        if not on_disk:
            return like.new_empty(shape)
        path, size = str(self._folder / f"{number}.bin"), self._size * like.numel()
        return torch.from_file(path, shared=True, size=size, dtype=like.dtype).view(shape)
