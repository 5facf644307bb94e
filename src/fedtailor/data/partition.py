"""Dealing the rows of a data set to clients, and each client's rows to its splits."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from .. import random
from ..errors import InputError
from . import schemes
from .config import SplitConfig
from .table import Dataset, Indices, Partition, Shares


def partition(dataset: Dataset, config: SplitConfig, seed: int) -> Partition:
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

    Returns:
        The rows of K clients, ascending, and a hash that is the same on every machine.

    Raises:
        InputError: the scheme can't be carried out on this data.

    >>> from fedtailor.data import DataConfig, load
    >>> parts = partition(load(DataConfig(name="digits")), SplitConfig(clients=3), seed=0)
    >>> parts.train.sizes(), parts.validation.sizes(), parts.test.sizes()
    (array([431, 431, 431]), array([48, 48, 48]), array([120, 120, 120]))
    """
    seed = seed if config.seed is None else config.seed
    labels = dataset.labels
    if labels is None:
        labels = np.zeros(len(dataset.inputs), np.int64)
    schemes.check(dataset, config, labels)
    owned, clusters = schemes.deal(dataset, config, labels, seed)
    empty = [client for client, rows in enumerate(owned) if len(rows) == 0]
    if empty:
        raise InputError(
            f"client {empty[0]} has no examples (so have {len(empty)} of {len(owned)} clients); "
            f"use fewer clients than {len(owned)}"
        )
    if dataset.num_train < len(dataset.inputs):
        owned = [_cap(rows, client, config, seed) for client, rows in enumerate(owned)]
        test = _deal_test(dataset, config, labels, owned, seed)
    else:
        owned, test = _cut_all(owned, labels, config.test, _test_count(config), "test", seed)
        owned = [_cap(rows, client, config, seed) for client, rows in enumerate(owned)]
    train, validation = _cut_all(
        owned, labels, config.validation, lambda count: count - 1, "validation", seed
    )
    shares = (Shares.of(train), Shares.of(validation), Shares.of(test))
    return Partition(*shares, _digest(shares, clusters), clusters)


def _cap(rows: Indices, client: int, config: SplitConfig, seed: int) -> Indices:
    if config.max_examples is None or len(rows) <= config.max_examples:
        return rows
    rng = random.generator(seed, "partition", "cap", client)
    return np.sort(rng.permutation(rows)[: config.max_examples])


def _test_count(config: SplitConfig) -> Callable[[int], int]:
    """How many of a client's rows may be for test."""
    return lambda count: count - (2 if config.validation > 0 else 1)


def _cut_all(
    owned: Sequence[Indices],
    labels: Indices,
    fraction: float,
    most: Callable[[int], int],
    purpose: str,
    seed: int,
) -> tuple[list[Indices], list[Indices]]:
    """(rest, cut) of each client: ``fraction`` of its rows, at least 1, at most ``most``."""
    pairs = []
    for client, rows in enumerate(owned):
        count = max(1, round(fraction * len(rows))) if fraction > 0 else 0
        count = max(0, min(count, most(len(rows))))
        rng = random.generator(seed, "partition", purpose, client)
        pairs.append(_cut(rows, labels[rows], count, rng))
    return [rest for rest, _ in pairs], [cut for _, cut in pairs]


def _cut(
    rows: Indices, labels: Indices, count: int, rng: np.random.Generator
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
    dataset: Dataset, config: SplitConfig, labels: Indices, owned: Sequence[Indices], seed: int
) -> list[Indices]:
    rows = np.arange(dataset.num_train, len(dataset.inputs))
    owner = np.full(len(rows), -1)
    if config.scheme == "natural" and dataset.groups is not None:
        ids = np.array([dataset.groups[own[0]] for own in owned])  # ascending
        place = np.searchsorted(ids, dataset.groups[rows]).clip(max=len(ids) - 1)
        owner = np.where(ids[place] == dataset.groups[rows], place, -1)
    if (owner == -1).all():
        owner = _owners(labels[rows], labels, owned, seed)
    order = np.argsort(owner, kind="stable")
    ends = np.searchsorted(owner[order], np.arange(len(owned) + 1))
    return [rows[order[a:b]] for a, b in itertools.pairwise(ends)]


def _owners(test_labels: Indices, labels: Indices, owned: Sequence[Indices], seed: int) -> Indices:
    """The client of each test row, -1 for none: by its share of the class's training rows."""
    holder = np.repeat(np.arange(len(owned)), [len(rows) for rows in owned])
    held = labels[np.concatenate(owned)]
    owner = np.full(len(test_labels), -1)
    for name in np.unique(test_labels):
        counts = np.bincount(holder[held == name], minlength=len(owned))
        if counts.sum() > 0:
            rng = random.generator(seed, "partition", "official test", int(name))
            places = rng.permutation(np.flatnonzero(test_labels == name))
            owner[places] = np.repeat(np.arange(len(owned)), _apportion(counts, len(places), rng))
    return owner


def _digest(shares: Sequence[Shares], clusters: Indices | None) -> str:
    digest = hashlib.sha256()
    arrays = [array for share in shares for array in (share.rows, share.offsets)]
    for array in [*arrays, *([] if clusters is None else [clusters])]:
        digest.update(len(array).to_bytes(8, "little"))
        digest.update(array.astype("<i8").tobytes())
    return digest.hexdigest()
