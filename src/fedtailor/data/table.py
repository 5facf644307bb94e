"""Examples as flat arrays, memory-mapped where they come from disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

Indices = NDArray[np.int64]
Batch = dict[str, Tensor]


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
    split (none if ``num_train == len(inputs)``). ``labels`` is int64 ``[N]``, None for causal
    language modelling. ``groups`` int64 ``[N]`` numbers the natural clients (a user, a role) if the
    source names a column for it. ``digest`` identifies the content.
    """

    inputs: Tokens | Images
    num_train: int
    task: Literal["classification", "causal-lm"]
    digest: str
    labels: Indices | None = None
    classes: Sequence[str] = field(default=())
    groups: Indices | None = None

    @property
    def num_classes(self) -> int:
        """The number of classes; 0 for language modelling."""
        return len(self.classes)

    def batch(self, indices: Indices) -> Batch:
        """The inputs and, for classification, ``labels`` int64 ``[b]``."""
        batch = self.inputs.batch(indices)
        if self.labels is not None:
            batch["labels"] = torch.from_numpy(self.labels[indices])
        return batch


@dataclass(frozen=True)
class Shares:
    """K disjoint lists of rows: client k has ``rows[offsets[k]:offsets[k + 1]]``."""

    rows: Indices
    offsets: Indices

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, client: int) -> Indices:
        return self.rows[self.offsets[client] : self.offsets[client + 1]]

    def sizes(self) -> Indices:
        """The number of rows of each client, ``[K]``."""
        return np.diff(self.offsets)

    @staticmethod
    def of(lists: Sequence[Indices]) -> Shares:
        """Pack ``lists``, one a client."""
        offsets = np.cumsum([0, *map(len, lists)], dtype=np.int64)
        rows = np.concatenate([np.asarray(part, dtype=np.int64) for part in lists])
        return Shares(rows, offsets)


@dataclass(frozen=True)
class Partition:
    """Who holds which rows, for training, validation and test, and a hash over all of it."""

    train: Shares
    validation: Shares
    test: Shares
    digest: str
    clusters: Indices | None = None  # [K]: the ground-truth cluster, where the scheme has one

    @property
    def rows(self) -> Indices:
        """All rows that anybody holds, ascending."""
        parts = (self.train, self.validation, self.test)
        return np.unique(np.concatenate([part.rows for part in parts]))
