"""Dealing the rows of a data set to clients, and each client's rows to its splits."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from .. import random
from ..errors import InputError
from . import schemes
from .config import SplitConfig
from .table import Dataset, Indices, Labels, Partition, Rows, Shares, Split

_BLOCK = 1 << 16  # rows hashed at a time
_RECENT = 10_000  # clients whose rows, once cut, are kept


def partition(
    dataset: Dataset, config: SplitConfig, seed: int, only: range | None = None
) -> Partition:
    """Divide ``dataset`` among clients, each with its own training, validation and test rows.

    A client's three splits follow one distribution. An official test split is dealt to the clients
    in proportion to their training rows of each class; rows of classes that nobody trains on are
    left out. With natural clients that occur in it, it goes by client instead. Without an official
    test split, a client's own rows are cut, by class as far as that goes. One row is kept for
    training before any is for validation, and one for validation before any is for test.

    Args:
        dataset: N rows.
        config: the scheme; ``max_examples`` caps training and validation rows together.
        seed: used unless ``config.seed`` is given.
        only: the data are those of these clients alone, and of ``config`` only the shares, the cap
            and the seed matter; None: of all clients.

    Returns:
        The rows of K clients, ascending, and a hash that is the same on every machine. Who holds
        which rows is settled at once, with a few bytes a row; how a client's rows are cut is
        worked out when they are asked for.

    Raises:
        InputError: the scheme can't be carried out on this data.

    >>> from fedtailor.data import DataConfig, load
    >>> parts = partition(load(DataConfig(name="digits")), SplitConfig(clients=3), seed=0)
    >>> [split.sizes().tolist() for split in (parts.train, parts.validation, parts.test)]
    [[431, 431, 431], [48, 48, 48], [120, 120, 120]]
    """
    seed = seed if config.seed is None else config.seed
    labels: Labels | None = dataset.labels
    if labels is None:
        labels = np.broadcast_to(np.int64(0), len(dataset.inputs))
    clusters: Indices | None = None
    if only is None:
        schemes.check(dataset, config, labels)
        dealt, clusters = schemes.deal(dataset, config, labels, seed)
    else:
        dealt = schemes.deal_own(dataset, config, only)
    clients = len(dealt)
    empty = np.flatnonzero(dealt.sizes() == 0)
    if only is None and len(empty):
        raise InputError(
            f"client {empty[0]} has no examples (so have {len(empty)} of {clients} clients); "
            f"use fewer clients than {clients}"
        )
    own: Split = dealt
    test: Split
    if dataset.num_train < len(dataset.inputs):
        own = dealt = _capped(dealt, config, seed)
        test = _deal_test(dataset, config, labels, dealt, seed)
    else:
        spare = 2 if config.validation > 0 else 1
        cut = _Cut(dealt, labels, seed, "test", config.test, spare)
        own, test = _Side(cut, 0), _Side(cut, 1)
        if config.max_examples is not None:  # then what nobody uses is let go
            test = Shares.packed((test[client] for client in range(clients)), test.sizes())
            own = _capped(own, config, seed)
    cut = _Cut(own, labels, seed, "validation", config.validation, 1)
    splits = (_Side(cut, 0), _Side(cut, 1), test)
    parts = Partition(*splits, digest="", clusters=clusters)
    return replace(parts, digest=_digest(parts, config, seed))


def _capped(split: Split, config: SplitConfig, seed: int) -> Shares:
    """At most ``config.max_examples`` of each client's rows."""
    most = config.max_examples
    if most is None:
        return split.pool
    sizes = np.minimum(split.sizes(), most)
    return Shares.packed((_cap(split[k], k, most, seed) for k in range(len(split))), sizes)


def _cap(rows: Indices, client: int, most: int, seed: int) -> Indices:
    if len(rows) <= most:
        return rows
    rng = random.generator(seed, "partition", "cap", client)
    return np.sort(rng.permutation(rows)[:most])


@dataclass(frozen=True)
class _Cut:
    """What cuts ``fraction`` of each client's rows off, at least 1, leaving ``spare``; done for a
    client when it is asked for."""

    source: Split
    labels: Labels
    seed: int
    purpose: str
    fraction: float
    spare: int
    recent: dict[int, tuple[Indices, Indices]] = field(default_factory=dict, repr=False)

    def count(self, sizes: Indices) -> Indices:
        """How many rows are cut off of so many."""
        if self.fraction == 0:
            return np.zeros_like(sizes)
        wanted = np.maximum(1, np.rint(self.fraction * sizes).astype(np.int64))
        return np.clip(sizes - self.spare, 0, wanted)

    def sides(self, client: int) -> tuple[Indices, Indices]:
        """(rest, cut) of a client, kept for a while."""
        if client not in self.recent:
            if len(self.recent) == _RECENT:
                self.recent.clear()
            self.recent[client] = self._sides(client)
        return self.recent[client]

    def _sides(self, client: int) -> tuple[Indices, Indices]:
        rows = self.source[client]
        count = int(self.count(np.array(len(rows))))
        if count == 0:
            return rows, rows[:0]
        rng = random.generator(self.seed, "partition", self.purpose, client)
        return _cut(rows, self.labels[rows], count, rng)


@dataclass(frozen=True)
class _Side:
    """The split that is one side of a cut: 0 the rest, 1 what is cut off."""

    cut: _Cut
    side: Literal[0, 1]

    @property
    def pool(self) -> Shares:
        return self.cut.source.pool

    @property
    def rows(self) -> Indices:
        return Shares.packed((self[client] for client in range(len(self))), self.sizes()).rows

    def __len__(self) -> int:
        return len(self.cut.source)

    def __getitem__(self, client: int) -> Indices:
        return self.cut.sides(client)[self.side]

    def size(self, client: int) -> int:
        return int(self._size(np.array(self.cut.source.size(client))))

    def sizes(self) -> Rows:
        whole = self.cut.source.sizes()  # few sizes, many clients
        return self._size(np.arange(whole.max(initial=0) + 1)).astype(whole.dtype)[whole]

    def _size(self, whole: Indices) -> Indices:
        count = self.cut.count(whole)
        return count if self.side else whole - count


def _cut(
    rows: Indices, labels: Labels, count: int, rng: np.random.Generator
) -> tuple[Indices, Indices]:
    """Cut ``count`` rows off, drawn from each class in proportion."""
    classes, sizes = np.unique(labels, return_counts=True)
    cut = np.zeros(len(rows), dtype=bool)
    for name, take in zip(classes, _apportion(sizes, count, rng), strict=True):
        cut[rng.permutation(np.flatnonzero(labels == name))[:take]] = True
    return rows[~cut], rows[cut]


def _apportion(weights: Indices, total: int, rng: np.random.Generator) -> Indices:
    """``total`` in whole numbers in proportion to ``weights``: largest remainder, ties drawn."""
    shares, rest = np.divmod(total * weights, weights.sum())
    order = np.lexsort((rng.random(len(weights)), -rest))
    shares[order[: total - shares.sum()]] += 1
    return shares


def _deal_test(
    dataset: Dataset, config: SplitConfig, labels: Labels, dealt: Shares, seed: int
) -> Shares:
    first = dataset.num_train
    owner = np.full(len(dataset.inputs) - first, -1)
    if config.scheme == "natural" and dataset.groups is not None:
        holders = np.flatnonzero(dealt.sizes())
        ids = dataset.groups[dealt.owned[dealt.offsets[holders]]]  # ascending
        groups = dataset.groups[first:]
        place = np.searchsorted(ids, groups).clip(max=len(ids) - 1)
        owner = np.where(ids[place] == groups, holders[place], -1)
    if (owner == -1).all():
        owner = _owners(labels[first:], labels, dealt, seed)
    return Shares.by_owner(owner, len(dealt), first)


def _owners(test_labels: Labels, labels: Labels, dealt: Shares, seed: int) -> Indices:
    """The client of each test row, -1 for none: by its share of the class's training rows."""
    holder = np.repeat(np.arange(len(dealt), dtype=np.int32), dealt.sizes())
    held = labels[dealt.owned]
    owner = np.full(len(test_labels), -1)
    for name in np.unique(test_labels):
        counts = np.bincount(holder[held == name], minlength=len(dealt))
        if counts.sum() > 0:
            rng = random.generator(seed, "partition", "official test", int(name))
            places = rng.permutation(np.flatnonzero(test_labels == name))
            owner[places] = np.repeat(np.arange(len(dealt)), _apportion(counts, len(places), rng))
    return owner


def _digest(parts: Partition, config: SplitConfig, seed: int) -> str:
    """Over the rows as dealt and all that says how they are cut."""
    digest = hashlib.sha256(repr((seed, config.test, config.validation)).encode())
    arrays = [array for pool in parts.pools for array in (pool.offsets, pool.owned)]
    for array in [*arrays, *([] if parts.clusters is None else [parts.clusters])]:
        digest.update(len(array).to_bytes(8, "little"))
        for start in range(0, len(array), _BLOCK):
            digest.update(array[start : start + _BLOCK].astype("<i8").tobytes())
    return digest.hexdigest()
