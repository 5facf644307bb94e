"""Examples as flat arrays, memory-mapped where they come from disk."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

Indices = NDArray[np.int64]
Labels = NDArray[np.integer]  # of classes
Rows = NDArray[np.integer]  # numbers of rows, four bytes each where they are enough
Batch = dict[str, Tensor]

_BLOCK = 1 << 18  # rows sorted at a time
_LARGE = 1 << 24  # bytes of a mapped file from which on what was read of it is let go


def _let_go(array: NDArray[Any]) -> None:
    """Of a large mapped file, take the pages that were read out of the process's memory, which
    would grow with every row that it has seen. The kernel keeps them in its cache."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    mapped = isinstance(base, mmap.mmap) and not array.flags.writeable
    if mapped and len(base) >= _LARGE and hasattr(mmap, "MADV_DONTNEED"):
        base.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True)
class Tokens:
    """N token sequences of different lengths: ``values`` ``[T]`` (any integer dtype) and
    ``offsets`` ``[N + 1]``; sequence i is ``values[offsets[i]:offsets[i + 1]]``."""

    values: NDArray[np.integer]
    offsets: Indices

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def lengths(self, indices: Indices) -> Indices:
        """The number of tokens of each sequence, ``[len(indices)]``."""
        return self.offsets[indices + 1] - self.offsets[indices]

    def batch(self, indices: Indices) -> Batch:
        """``input_ids`` int64 ``[b, L]`` and ``attention_mask`` float ``[b, L]``, padded with 0 to
        the longest."""
        lengths = self.lengths(indices)
        ids = np.zeros((len(indices), int(lengths.max())), dtype=np.int64)
        for row, (index, length) in enumerate(zip(indices, lengths, strict=True)):
            ids[row, :length] = self.values[self.offsets[index] : self.offsets[index] + length]
        _let_go(self.values)
        mask = np.arange(ids.shape[1]) < lengths[:, None]
        return {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy(mask.astype(np.float32)),
        }


@dataclass(frozen=True)
class Images:
    """N images, ``values`` uint8 ``[N, C, H, W]`` (or float32, then taken as they are)."""

    values: NDArray[np.uint8] | NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.values)

    def lengths(self, indices: Indices) -> Indices:
        """All 1: images have one size."""
        return np.ones(len(indices), dtype=np.int64)

    def batch(self, indices: Indices) -> Batch:
        """``pixel_values`` float ``[b, C, H, W]``, bytes scaled to [0, 1]."""
        values = torch.from_numpy(np.array(self.values[indices]))
        _let_go(self.values)
        return {"pixel_values": values / 255 if values.dtype == torch.uint8 else values}

    def resized(self, height: int, width: int) -> Images:
        """The same images at another size (bilinear, bytes rounded), in memory."""
        values = torch.from_numpy(np.array(self.values))
        sized = F.interpolate(values.float(), (height, width), mode="bilinear", antialias=True)
        whole = sized if values.is_floating_point() else sized.round().clamp(0, 255)
        return Images(whole.to(values.dtype).numpy())


@dataclass(frozen=True)
class Dataset:
    """A data set ready for training.

    Rows ``[0, num_train)`` may be trained on; rows from ``num_train`` on are the official test
    split (none if ``num_train == len(inputs)``). ``labels`` ``[N]`` (any integer dtype) is None for
    causal language modelling. ``groups`` int64 ``[N]`` numbers the natural clients (a user, a role)
    if the source names a column for it. ``digest`` identifies the content.
    """

    inputs: Tokens | Images
    num_train: int
    task: Literal["classification", "causal-lm"]
    digest: str
    labels: Labels | None = None
    classes: Sequence[str] = field(default=())
    groups: Indices | None = None

    @property
    def num_classes(self) -> int:
        """The number of classes; 0 for language modelling."""
        return len(self.classes)

    @property
    def modality(self) -> Literal["text", "image"]:
        """What the inputs are."""
        return "text" if isinstance(self.inputs, Tokens) else "image"

    @property
    def picture(self) -> tuple[int, ...] | None:
        """Channels, height and width; None for texts."""
        return None if isinstance(self.inputs, Tokens) else self.inputs.values.shape[1:]

    def batch(self, indices: Indices) -> Batch:
        """The inputs and, for classification, ``labels`` int64 ``[b]``."""
        batch = self.inputs.batch(indices)
        if self.labels is not None:
            batch["labels"] = torch.from_numpy(self.labels[indices].astype(np.int64))
        return batch


class Split(Protocol):
    """K disjoint lists of rows, one a client."""

    @property
    def pool(self) -> Shares:
        """The rows that this split and perhaps others are cut from, or the split itself."""

    @property
    def rows(self) -> Indices:
        """The rows of all clients."""

    def __len__(self) -> int: ...

    def __getitem__(self, client: int) -> Indices: ...

    def size(self, client: int) -> int:
        """The number of rows of one client."""

    def sizes(self) -> Rows:
        """The number of rows of each client, ``[K]``."""


@dataclass(frozen=True)
class Shares:
    """A `Split` that is written out: client k has ``owned[offsets[k]:offsets[k + 1]]``."""

    owned: Rows
    offsets: Rows

    @property
    def pool(self) -> Shares:
        return self

    @property
    def rows(self) -> Indices:
        return self.owned.astype(np.int64)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, client: int) -> Indices:
        return self.owned[self.offsets[client] : self.offsets[client + 1]].astype(np.int64)

    def size(self, client: int) -> int:
        return int(self.offsets[client + 1] - self.offsets[client])

    def sizes(self) -> Rows:
        return np.diff(self.offsets)

    @staticmethod
    def of(lists: Sequence[Indices]) -> Shares:
        """Pack ``lists``, one a client."""
        return Shares.packed(lists, np.array([len(part) for part in lists], np.int64))

    @staticmethod
    def packed(lists: Iterable[Indices], sizes: Rows) -> Shares:
        """Pack ``lists``, one a client, whose lengths are known before they are."""
        offsets = _starts(sizes)
        owned = np.empty(offsets[-1], np.int64)
        for start, part in zip(offsets, lists, strict=False):
            owned[start : start + len(part)] = part
        return Shares(owned, offsets)

    @staticmethod
    def by_owner(owner: NDArray[np.integer], num_clients: int, first: int = 0) -> Shares:
        """Client k has the rows, counted from ``first`` on and ascending, whose ``owner`` is k; -1
        is nobody."""
        sizes = np.zeros(num_clients, np.int64)
        blocks = range(0, len(owner), _BLOCK)
        for start in blocks:
            part = owner[start : start + _BLOCK]
            sizes += np.bincount(part[part >= 0], minlength=num_clients)
        offsets = _starts(sizes)
        owned = np.empty(offsets[-1], row_type(first + len(owner)))
        free = offsets[:-1].copy()
        for start in blocks:
            order = np.argsort(owner[start : start + _BLOCK], kind="stable")
            whose = owner[start + order]
            order, whose = order[whose >= 0], whose[whose >= 0]
            owned[free[whose] + np.arange(len(whose)) - np.searchsorted(whose, whose)] = (
                first + start + order
            )
            free += np.bincount(whose, minlength=num_clients)
        return Shares(owned, offsets)


def _starts(sizes: Rows) -> Rows:
    """Where the rows of each of K clients begin, and where the last one's end, ``[K + 1]``."""
    found = np.zeros(len(sizes) + 1, row_type(int(sizes.sum())))
    np.cumsum(sizes, dtype=found.dtype, out=found[1:])
    return found


def row_type(count: int) -> type[np.integer]:
    """What holds the numbers of ``count`` rows: four bytes where they are enough."""
    return np.int32 if count <= np.iinfo(np.int32).max else np.int64


@dataclass(frozen=True)
class Partition:
    """Who holds which rows, for training, validation and test, and a hash over all of it."""

    train: Split
    validation: Split
    test: Split
    digest: str
    clusters: Indices | None = None  # [K]: the ground-truth cluster, where the scheme has one

    @property
    def pools(self) -> list[Shares]:
        """The written-out rows that the three splits are cut from, each once; together they are
        all that anybody holds."""
        found = (self.train.pool, self.validation.pool, self.test.pool)
        return list({id(pool): pool for pool in found}.values())

    @property
    def rows(self) -> Indices:
        """All rows that anybody holds, ascending."""
        end = max((int(pool.owned.max(initial=-1)) for pool in self.pools), default=-1) + 1
        held = np.zeros(end, dtype=bool)
        for pool in self.pools:
            held[pool.owned] = True
        return np.flatnonzero(held)

    def counts(self, labels: Labels, num_classes: int, clients: slice) -> Indices:
        """Examples of some clients by class, over their three splits, ``[n, classes]``."""
        start, stop, _ = clients.indices(len(self.train))
        total = np.zeros((stop - start) * num_classes, np.int64)
        for pool in self.pools:
            ends = pool.offsets[start : stop + 1]
            place = np.repeat(np.arange(stop - start), np.diff(ends)) * num_classes
            place += labels[pool.owned[ends[0] : ends[-1]]]
            total += np.bincount(place, minlength=len(total))
        return total.reshape(-1, num_classes)
