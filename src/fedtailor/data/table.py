"""Examples as flat arrays, memory-mapped where they come from disk."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from ..objectives import objective_of
from ..objectives.objective import IGNORED, Objective
from ..params import Batch
from .names import check_names
from .omissions import Omission

Indices = NDArray[np.int64]
Labels = NDArray[np.integer]  # class numbers
Rows = NDArray[np.integer]  # row numbers, of four bytes each if that is enough
Fingerprints = NDArray[np.uint64]  # hashes of rows

_CHUNK = 1 << 18  # rows that are sorted together
_HASHED = 1 << 14  # rows that are hashed together
_LARGE = 1 << 24  # bytes of a mapped file whose pages are released after a read


def _release_pages(array: NDArray[Any]) -> None:
    """Release the pages of a large mapped file that were read: else the process's memory would grow
    with every row. The kernel's cache still has them."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    mapped = isinstance(base, mmap.mmap) and not array.flags.writeable
    if mapped and len(base) >= _LARGE and hasattr(mmap, "MADV_DONTNEED"):
        base.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True)
class Ragged:
    """N rows of numbers of different lengths: ``values`` ``[T]`` (any integer dtype) and
    ``offsets`` ``[N + 1]``; row i is ``values[offsets[i]:offsets[i + 1]]``."""

    values: NDArray[np.integer]
    offsets: Indices

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> NDArray[np.integer]:
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def lengths(self, indices: Indices) -> Indices:
        """Return the length of each row, ``[len(indices)]``."""
        return self.offsets[indices + 1] - self.offsets[indices]

    def contents(self, indices: Indices) -> Iterator[bytes]:
        """Yield the bytes of each row, the same ones whatever the integers' type is."""
        for index in indices:
            yield self[index].astype("<u4").tobytes()
        _release_pages(self.values)

    def padded(self, indices: Indices, filler: int) -> NDArray[np.int64]:
        """Return rows ``[b, L]``, padded with ``filler`` to the longest."""
        return _grid(self.values, self.offsets[indices], self.lengths(indices), filler)


def _grid(
    values: NDArray[np.integer], starts: Indices, lengths: Indices, filler: int = 0
) -> NDArray[np.int64]:
    """Return sequences of ``values``, padded to the longest: those that begin at ``starts`` and
    have such ``lengths``, ``[...]``, become ``[..., L]``."""
    grid = np.full((*starts.shape, int(lengths.max(initial=0))), filler, dtype=np.int64)
    for place in np.ndindex(*starts.shape):
        grid[place][: lengths[place]] = values[starts[place] : starts[place] + lengths[place]]
    _release_pages(values)
    return grid


@dataclass(frozen=True)
class Tokens(Ragged):
    """N rows of tokens. ``cut`` are the rows that were truncated, ascending; None: unknown.
    ``types`` ``[T]`` say which of a pair's texts a token is of. ``sizes`` are the lengths of
    several sequences that each row consists of; None: each is one."""

    cut: Indices | None = None
    types: NDArray[np.uint8] | None = None
    sizes: Ragged | None = None

    def batch(self, indices: Indices) -> Batch:
        """Return ``input_ids`` int64 ``[b, L]`` and ``attention_mask`` float ``[b, L]``, padded
        with 0 to the longest sequence, and ``token_type_ids`` where there are types; ``[b, S, L]``
        where a row is several sequences."""
        starts, lengths = self.offsets[indices][:, None], self.lengths(indices)[:, None]
        if self.sizes is not None:  # a row of fewer sequences than S has some of length 0
            lengths = self.sizes.padded(indices, 0)
            starts = starts + np.cumsum(lengths, 1) - lengths  # [b, S]
        ids = _grid(self.values, starts, lengths)
        mask = np.arange(ids.shape[-1]) < lengths[..., None]
        batch = {
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy(mask.astype(np.float32)),
        }
        if self.types is not None:
            batch["token_type_ids"] = torch.from_numpy(_grid(self.types, starts, lengths))
        if self.sizes is None:
            batch = {name: value[:, 0] for name, value in batch.items()}
        return batch


@dataclass(frozen=True)
class Images:
    """N images, ``values`` uint8 ``[N, C, H, W]`` (or float32, which batches don't scale)."""

    values: NDArray[np.uint8] | NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.values)

    def lengths(self, indices: Indices) -> Indices:
        """Return 1 for each, since images have one size: ``[len(indices)]``."""
        return np.ones(len(indices), dtype=np.int64)

    def contents(self, indices: Indices) -> Iterator[bytes]:
        """Yield the bytes of each image."""
        for index in indices:
            yield self.values[index].tobytes()
        _release_pages(self.values)

    def batch(self, indices: Indices) -> Batch:
        """Return ``pixel_values`` float ``[b, C, H, W]``, bytes scaled to [0, 1]."""
        values = torch.from_numpy(np.array(self.values[indices]))
        _release_pages(self.values)
        return {"pixel_values": values / 255 if values.dtype == torch.uint8 else values}

    def resized(self, height: int, width: int) -> Images:
        """Return the images at another size in pixels (bilinear, bytes rounded), in memory."""
        if self.values.shape[2:] == (height, width):
            return self
        values = torch.from_numpy(np.array(self.values))
        sized = F.interpolate(values.float(), (height, width), mode="bilinear", antialias=True)
        rounded = sized if values.is_floating_point() else sized.round().clamp(0, 255)
        return Images(rounded.to(values.dtype).numpy())


@dataclass(frozen=True)
class Dataset:
    """A data set ready for training.

    Rows ``[0, num_train)`` are for training; rows from ``num_train`` on are the official test
    split (none if ``num_train == len(inputs)``). ``task`` is the kind of task. ``labels`` ``[N]``
    or ``[N, outputs]`` are its targets (class numbers of any integer dtype where it has
    ``classes``), or `Ragged` where they go by tokens; None if the inputs are. ``groups`` int64
    ``[N]`` numbers the natural clients (a user, a role) if the source names a column for it, and
    ``client_names`` has a name for each number.
    ``digest`` identifies the content; names are no part of it; it is computed unless it is given.
    ``omissions`` are the rows that were left out or cut. ``scale`` is that of the targets, where
    the task scales them. ``rows`` are the inputs and targets as the source has them, where the task
    keeps them; ``pair`` are the columns of inputs that are two texts.
    ``max_length`` are the most tokens of a sequence; 0: unknown.
    """

    inputs: Tokens | Images
    num_train: int
    task: str
    digest: str = ""
    labels: Labels | Ragged | None = None
    classes: Sequence[str] = field(default=())
    groups: Indices | None = None
    client_names: tuple[str, ...] | None = None
    omissions: tuple[Omission, ...] = ()
    scale: tuple[float, ...] = ()
    rows: Sequence[Any] | None = field(default=None, repr=False, compare=False)
    pair: tuple[str, ...] = ()
    max_length: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        """Refuse names that can't be shown; compute a digest that isn't given."""
        check_names("class", self.classes)
        check_names("client", self.client_names or ())
        if not self.digest:
            object.__setattr__(self, "digest", self._digest())

    def _digest(self) -> str:
        has_labels, has_groups = self.labels is not None, self.groups is not None
        head = [self.task, self.num_train, tuple(self.classes), has_labels, has_groups]
        digest = hashlib.sha256(repr(head).encode())
        arrays: list[NDArray[Any] | None] = [self.inputs.values]
        if isinstance(self.inputs, Tokens):
            arrays.append(self.inputs.offsets)
        labels = self.labels
        arrays += [labels.values if isinstance(labels, Ragged) else labels, self.groups]
        arrays.append(labels.offsets if isinstance(labels, Ragged) else None)
        if isinstance(self.inputs, Tokens):
            sizes = self.inputs.sizes
            arrays += [self.inputs.types, None if sizes is None else sizes.values]
        for array in arrays:
            if array is not None:
                digest.update(repr((array.shape, array.dtype.str)).encode())
                digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    @property
    def objective(self) -> Objective:
        """The kind of task."""
        return objective_of(self.task).scaled(self.scale)

    @property
    def class_numbers(self) -> Labels | None:
        """The class of each row, ``[N]``; None where rows have none."""
        if isinstance(self.labels, Ragged) or not self.objective.has_classes:
            return None
        return self.labels

    @property
    def num_classes(self) -> int:
        """The number of classes; 0 where rows have none."""
        return len(self.classes)

    @property
    def modality(self) -> Literal["text", "image"]:
        """The kind of the inputs."""
        return "text" if isinstance(self.inputs, Tokens) else "image"

    @property
    def picture(self) -> tuple[int, ...] | None:
        """The channels, height and width of a picture; None for texts."""
        return None if isinstance(self.inputs, Tokens) else self.inputs.values.shape[1:]

    def batch(self, indices: Indices) -> Batch:
        """Return the inputs and the targets: ``labels`` ``[b]`` or ``[b, outputs]``, int64 for
        whole numbers; where they go by tokens, padded with ``IGNORED``."""
        batch = self.inputs.batch(indices)
        labels = self.labels
        if isinstance(labels, Ragged):
            batch["labels"] = torch.from_numpy(labels.padded(indices, IGNORED))
        elif labels is not None:
            batch["labels"] = torch.from_numpy(_wide(labels[indices]))
        return batch

    def targets(self, indices: Indices) -> Any:
        """Return the targets of some rows: ``[n, ...]``, or n arrays where they go by tokens."""
        if isinstance(self.labels, Ragged):
            return [self.labels[index] for index in indices]
        return None if self.labels is None else _wide(self.labels[indices])

    def fingerprints(self, rows: Indices) -> Fingerprints:
        """Return the hashes of some rows, of eight bytes, in the order of ``rows``: over a row's
        tokens or pixels and its label. A row has the same one in any data set."""
        found = np.empty(len(rows), np.uint64)
        for start in range(0, len(rows), _HASHED):
            some = rows[start : start + _HASHED]
            pairs = zip(self._label_bytes(some), self.inputs.contents(some), strict=True)
            digests = (hashlib.blake2b(label + row, digest_size=8).digest() for label, row in pairs)
            found[start : start + _HASHED] = np.frombuffer(b"".join(digests), "<u8")
        return found

    def _label_bytes(self, rows: Indices) -> Iterator[bytes]:
        if isinstance(self.labels, Ragged):
            return self.labels.contents(rows)
        labels = np.zeros(len(rows), np.int64) if self.labels is None else self.labels[rows]
        number = "<f8" if labels.dtype.kind == "f" else "<i8"
        return (label.tobytes() for label in labels.astype(number))


def _wide(labels: NDArray[Any]) -> NDArray[Any]:
    """Whole numbers as int64."""
    return labels if labels.dtype.kind == "f" else labels.astype(np.int64)


class Split(Protocol):
    """K disjoint lists of rows, one a client, of ``sizes`` ``[K]``. ``rows`` are those of all
    clients, and ``shares`` the shares of which this split is a part, or the split itself."""

    @property
    def shares(self) -> Shares: ...

    @property
    def rows(self) -> Indices: ...

    def __len__(self) -> int: ...

    def __getitem__(self, client: int) -> Indices: ...

    def size(self, client: int) -> int: ...

    def sizes(self) -> Rows: ...


@dataclass(frozen=True)
class Shares:
    """A `Split` as two arrays: client k has the rows ``values[offsets[k]:offsets[k + 1]]``."""

    values: Rows
    offsets: Rows

    @property
    def shares(self) -> Shares:
        return self

    @property
    def rows(self) -> Indices:
        return self.values.astype(np.int64)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, client: int) -> Indices:
        return self.values[self.offsets[client] : self.offsets[client + 1]].astype(np.int64)

    def size(self, client: int) -> int:
        return int(self.offsets[client + 1] - self.offsets[client])

    def sizes(self) -> Rows:
        return np.diff(self.offsets)

    @staticmethod
    def of(lists: Sequence[Indices]) -> Shares:
        """Pack ``lists`` of rows, one a client."""
        return Shares.pack(lists, np.array([len(rows) for rows in lists], np.int64))

    @staticmethod
    def pack(lists: Iterable[Indices], sizes: Rows) -> Shares:
        """Pack ``lists`` of rows, one a client, whose lengths ``sizes`` ``[K]`` are known."""
        offsets = _offsets(sizes)
        values = np.empty(offsets[-1], np.int64)
        for start, rows in zip(offsets, lists, strict=False):
            values[start : start + len(rows)] = rows
        return Shares(values, offsets)

    @staticmethod
    def by_owner(owners: NDArray[np.integer], num_clients: int, first: int = 0) -> Shares:
        """Give each of K clients the rows that it owns, in ascending order; ``owners`` ``[N]`` has
        the client of each row from ``first`` on, -1 for none."""
        sizes = np.zeros(num_clients, np.int64)
        chunks = range(0, len(owners), _CHUNK)
        for start in chunks:
            chunk = owners[start : start + _CHUNK]
            sizes += np.bincount(chunk[chunk >= 0], minlength=num_clients)
        offsets = _offsets(sizes)
        values = np.empty(offsets[-1], row_type(first + len(owners)))
        ends = offsets[:-1].copy()  # of each client's rows so far
        for start in chunks:
            order = np.argsort(owners[start : start + _CHUNK], kind="stable")
            chunk = owners[start + order]
            order, chunk = order[chunk >= 0], chunk[chunk >= 0]
            values[ends[chunk] + np.arange(len(chunk)) - np.searchsorted(chunk, chunk)] = (
                first + start + order
            )
            ends += np.bincount(chunk, minlength=num_clients)
        return Shares(values, offsets)


def _offsets(sizes: Rows) -> Rows:
    """Return where the rows of each of K clients begin, and where the last one's end: [K + 1]."""
    offsets = np.zeros(len(sizes) + 1, row_type(int(sizes.sum())))
    np.cumsum(sizes, dtype=offsets.dtype, out=offsets[1:])
    return offsets


def row_type(count: int) -> type[np.integer]:
    """Return the type for the numbers of ``count`` rows: of four bytes if that is enough."""
    return np.int32 if count <= np.iinfo(np.int32).max else np.int64


@dataclass(frozen=True)
class Partition:
    """The rows of every client, for training, validation and test, and a hash over all of them.

    ``names`` are those of the K clients, if they are natural ones; at a site, other sites' clients
    are called "". ``omissions`` are the clients and rows that the division leaves out.
    """

    train: Split
    validation: Split
    test: Split
    digest: str
    clusters: Indices | None = None  # [K]: the ground-truth clusters, if the scheme makes any
    names: tuple[str, ...] | None = None
    omissions: tuple[Omission, ...] = ()

    def split(self, name: Literal["train", "validation", "test"]) -> Split:
        """The split of that name."""
        return {"train": self.train, "validation": self.validation, "test": self.test}[name]

    @property
    def shares(self) -> list[Shares]:
        """The shares that the three splits are made of, each once: all rows of all clients."""
        shares = (self.train.shares, self.validation.shares, self.test.shares)
        return list({id(one): one for one in shares}.values())

    @property
    def rows(self) -> Indices:
        """All rows that any client has, ascending."""
        end = max((int(shares.values.max(initial=-1)) for shares in self.shares), default=-1) + 1
        is_used = np.zeros(end, dtype=bool)
        for shares in self.shares:
            is_used[shares.values] = True
        return np.flatnonzero(is_used)

    def counts(self, labels: Labels, num_classes: int, clients: slice) -> Indices:
        """Count the examples of n ``clients`` by class, over their three splits: ``[n, classes]``;
        ``labels`` ``[N]`` are class numbers."""
        start, stop, _ = clients.indices(len(self.train))
        total = np.zeros((stop - start) * num_classes, np.int64)
        for shares in self.shares:
            offsets = shares.offsets[start : stop + 1]
            cells = np.repeat(np.arange(stop - start), np.diff(offsets)) * num_classes
            cells += labels[shares.values[offsets[0] : offsets[-1]]]
            total += np.bincount(cells, minlength=len(total))
        return total.reshape(-1, num_classes)
