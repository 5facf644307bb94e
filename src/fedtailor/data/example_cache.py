"""A cache of results that a method computes once an example, for every later batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..params import CACHED, Batch, Params, add_prefix
from .table import Dataset, Indices, Tokens

# Neighbouring rows that are computed together. A row always has the same neighbours, so that its
# result always has the same bits.
_CHUNK = 32


class LastResults:
    """The results of a run's last cache, for the next one: of a text, what frozen layers make of it
    is the same under every method and seed."""

    def __init__(self) -> None:
        self.rows: Indices = np.array([], np.int64)
        self.results: dict[int, Params] = {}


class ExampleCache:
    """Tensors by row of a data set, computed from a batch when a row is first used: ``compute``
    turns a batch into ``[b, ...]`` tensors. For texts, tensors of three dimensions and more are
    ``[b, L, ...]``, by token: the cache stores each row at its own length. ``rows`` are all that
    batches may use, ascending; others are never computed."""

    def __init__(self, compute: Callable[[Batch], Params], dataset: Dataset, rows: Indices) -> None:
        self._compute = compute
        self._dataset = dataset
        self._usable_rows = rows
        self._results: dict[int, Params] = {}
        self._seconds = 0.0  # of one row, in the last chunk
        self._goes_on = False

    @property
    def seconds(self) -> float:
        """The estimated time of the results of all rows; 0 before there are some, and where those
        of an earlier cache are used."""
        return 0.0 if self._goes_on else self._seconds * len(self._usable_rows)

    def go_on_from(self, last: LastResults) -> None:
        """Use the ``last`` results if they are of the same rows and those that are here already
        are the same to the bit; leave there what the next cache can use."""
        self._goes_on = np.array_equal(last.rows, self._usable_rows) and all(
            row in last.results and _same(result, last.results[row])
            for row, result in self._results.items()
        )
        if self._goes_on:
            self._results = last.results
        last.rows, last.results = self._usable_rows, self._results

    def fits(self, limit_mb: float) -> bool:
        """Say whether results can be cached: there are some, they have the form described above,
        and the results of all rows take at most ``limit_mb`` MB (estimated from a first chunk)."""
        inputs = self._dataset.inputs
        if isinstance(inputs, Tokens) and inputs.sizes is None and not self._by_token():
            return False
        self._compute_chunk(0)
        results = self._results.values()
        size = sum(v.numel() * v.element_size() for result in results for v in result.values())
        return 0 < size / len(self._results) * len(self._usable_rows) <= limit_mb * 1e6

    def _by_token(self) -> bool:
        """Whether results of three dimensions and more are ``[b, L, ...]``, by two texts."""
        lengths = self._dataset.inputs.lengths(self._usable_rows)
        for row in self._usable_rows[[lengths.argmin(), lengths.argmax()]]:
            batch = self._dataset.batch(np.array([row]))
            with torch.no_grad():
                results = self._compute(batch)
            length = batch["input_ids"].shape[1]
            if any(value.dim() > 2 and value.shape[1] != length for value in results.values()):
                return False
        return True

    def add_to(self, batch: Batch, rows: Indices) -> Batch:
        """Return ``batch``, which consists of ``rows``, with the results as ``cached.NAME``."""
        positions = np.searchsorted(self._usable_rows, rows).tolist()
        for row, position in zip(rows.tolist(), positions, strict=True):
            if row not in self._results:
                self._compute_chunk(position // _CHUNK)
        results = [self._results[row] for row in rows.tolist()]
        stacked = {n: padded_stack([each[n] for each in results]) for n in results[0]}
        return {**batch, **add_prefix(stacked, CACHED)}

    def _compute_chunk(self, chunk: int) -> None:
        rows = self._usable_rows[chunk * _CHUNK : (chunk + 1) * _CHUNK]
        start = time.perf_counter()
        with torch.no_grad():
            results = self._compute(self._dataset.batch(rows))
        self._seconds = (time.perf_counter() - start) / len(rows)
        lengths = self._dataset.inputs.lengths(rows).tolist()
        is_text = isinstance(self._dataset.inputs, Tokens)
        for index, (row, length) in enumerate(zip(rows.tolist(), lengths, strict=True)):
            end = length if is_text else None
            self._results[row] = {
                name: (value[index, :end] if value.dim() > 2 else value[index]).clone()
                for name, value in results.items()
            }


def _same(a: Params, b: Params) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def padded_stack(
    values: Sequence[Tensor], filler: int = 0, least: Sequence[int] | None = None
) -> Tensor:
    """Stack tensors along a new leading axis, each padded with ``filler`` to the largest in every
    dimension, or to the size in ``least`` if that is larger."""
    shapes = [value.shape for value in values] + ([] if least is None else [torch.Size(least)])
    shape = [max(sizes) for sizes in zip(*shapes, strict=True)]

    def padded(value: Tensor) -> Tensor:
        missing = [most - size for most, size in zip(shape, value.shape, strict=True)]
        widths = [width for number in reversed(missing) for width in (0, number)]
        return F.pad(value, widths, value=filler) if any(missing) else value

    return torch.stack([padded(value) for value in values])
