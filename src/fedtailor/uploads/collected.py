"""A round's uploads at the server: stacked, in memory or memory-mapped, or added up as they come.

Rows are those of the uploads that are there, in the order of the cohort's members.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..params import Params, add, clone
from ..stacked import GROUP, accumulation_dtype
from ..torch_private import in_each


class UploadStack:
    """A cohort's uploads, stacked ``[c, ...]``; memory-mapped in ``folder``, by default the
    one for temporary files, if they take more than ``limit`` bytes. The files there have no names,
    so nothing of them is left after a kill."""

    keeps = True

    def __init__(self, cohort_size: int, limit: float, folder: Path | None = None) -> None:
        self._size = cohort_size
        self._limit = limit
        self._folder = folder
        self._there: set[int] = set()  # positions
        self._params: Params = {}

    def put(self, position: int, upload: Params) -> None:
        """Take the upload of the member at ``position``."""
        if not self._params:
            nbytes = self._size * sum(v.numel() * v.element_size() for v in upload.values())
            on_disk = nbytes > self._limit
            self._params = {name: self._allocate(v, on_disk) for name, v in upload.items()}
        for name, value in upload.items():
            self._params[name][position].copy_(value)
        self._there.add(position)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in ascending order. They move in place: memory takes no copy."""
        there = sorted(self._there)
        for name, value in self._params.items():
            for at, row in enumerate(rows):
                if at != there[row]:
                    value[at].copy_(value[there[row]])
            self._params[name] = value[: len(rows)]
        self._size, self._there = len(rows), set(range(len(rows)))

    def upload(self, row: int) -> Params:
        """One upload, as views."""
        return {name: value[row] for name, value in self.params.items()}

    @property
    def params(self) -> Params:
        """The uploads that are there, ``[c, ...]``."""
        if len(self._there) < self._size:
            self.keep(range(len(self._there)))
        return self._params

    def _allocate(self, like: Tensor, on_disk: bool) -> Tensor:
        shape = (self._size, *like.shape)
        if not on_disk:
            return like.new_empty(shape)
        size = self._size * like.numel()
        descriptor, path = tempfile.mkstemp(prefix="fedtailor-", dir=self._folder)
        try:
            _reserve(descriptor, path, size * like.element_size())
            return torch.from_file(path, shared=True, size=size, dtype=like.dtype).view(shape)
        finally:
            os.close(descriptor)
            Path(path).unlink()


def _reserve(descriptor: int, path: str, nbytes: int) -> None:
    """Make room for ``nbytes``: on a full disk, writing to a memory map would end the process."""
    if nbytes == 0 or not hasattr(os, "posix_fallocate"):  # macOS
        return
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}: uploads need {nbytes} bytes", path) from None


class UploadMean:
    """The weighted mean of a cohort's uploads as one row, ``[1, ...]``.

    Uploads are added in an ``order`` of positions that is the same under every executor, and then
    forgotten. An upload that comes early is kept until those before it have come. ``weights``
    ``[c]``, by position, have the sum 1. They are None if single uploads may turn out to be left
    out: then each is kept, and added by `weigh`. Sums are those of `stacked.weighted_sum`.
    """

    def __init__(self, order: Sequence[int], weights: Tensor | None = None) -> None:
        self.keeps = weights is None
        self._order = list(order)
        self._early: dict[int, Params] = {}  # by position
        self._weights: dict[int, float] = {}
        if weights is not None:
            self._begin(range(len(self._order)), weights)

    def put(self, position: int, upload: Params) -> None:
        """Add the upload of the member at ``position``, or keep a copy of it until its turn."""
        due = bool(self._weights) and position == self._order[self._added]
        self._early[position] = upload if due else clone(upload)
        if due:
            self._add_early()

    def keep(self, rows: Sequence[int]) -> None:
        there = sorted(self._early)
        self._early = {there[row]: self._early[there[row]] for row in rows}

    def upload(self, row: int) -> Params:
        """One upload, where all are kept."""
        return self._early[sorted(self._early)[row]]

    def weigh(self, weights: Tensor) -> None:
        """Take the mean of the uploads that are kept, with these ``weights`` by row."""
        self._begin(sorted(self._early), weights)
        self._add_early()

    def _begin(self, positions: Sequence[int], weights: Tensor) -> None:
        self._weights = dict(zip(positions, weights.tolist(), strict=True))
        self._order = [position for position in self._order if position in self._weights]
        self._added = 0
        self._group: Params = {}
        self._total: Params = {}
        self._dtypes: dict[str, torch.dtype] = {}

    def _add_early(self) -> None:
        while self._added < len(self._order) and self._order[self._added] in self._early:
            position = self._order[self._added]
            self._add(position, self._early[position])
            if not self.keeps:
                del self._early[position]

    def _add(self, position: int, upload: Params) -> None:
        if self._added == 0:
            for name, value in upload.items():
                self._dtypes[name] = value.dtype
                self._group[name] = torch.zeros_like(value, dtype=accumulation_dtype(value.dtype))
        sums = [self._group[name] for name in upload]
        values = [x.to(sum_.dtype) for x, sum_ in zip(upload.values(), sums, strict=True)]
        in_each("add", sums, values, alpha=self._weights[position])
        self._added += 1
        if self._added % GROUP == 0:
            self._total = self._sums()
            self._group = {name: torch.zeros_like(part) for name, part in self._group.items()}

    def _sums(self) -> Params:
        """float64."""
        if not self._total:
            return {name: part.double() for name, part in self._group.items()}
        return {name: self._total[name] + part for name, part in self._group.items()}

    @property
    def params(self) -> Params:
        """The mean ``[1, ...]``, of the uploads' dtypes."""
        return {name: value.to(self._dtypes[name])[None] for name, value in self._sums().items()}


class UploadSum:
    """The sum of a cohort's uploads modulo 2^32, of int32 tensors, as one row ``[1, ...]``."""

    keeps = False

    def __init__(self) -> None:
        self._total: Params = {}

    def put(self, position: int, upload: Params) -> None:
        self._total = add(self._total, upload) if self._total else clone(upload)  # wraps round

    def keep(self, rows: Sequence[int]) -> None:
        raise AssertionError("unreachable: rules that leave uploads out are refused")

    def upload(self, row: int) -> Params:
        raise AssertionError("unreachable: what needs single uploads is refused")

    @property
    def params(self) -> Params:
        return {name: value[None] for name, value in self._total.items()}


Uploads = UploadStack | UploadMean | UploadSum
