"""A partition: which clients have which rows, and how each client's rows are split.

`partition` assigns rows to clients by a scheme (`schemes`). Of each client's rows it then holds out
a part for test, unless the data set has an official test split, and of the rest a part for
validation. Which rows these are is computed for one client at a time, when its rows are used.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from .. import random
from ..errors import InputError, listed
from . import schemes
from .config import SplitConfig
from .omissions import Omission, of_clients, of_held_out, of_rows
from .table import Dataset, Indices, Labels, Partition, Rows, Shares, Split

_CHUNK = 1 << 16  # rows that are hashed together
_FEW_TEST_ROWS = 5  # fewer say little of a client
_NOT_SCORED = "without a test row, not scored"
_FEW = (
    f"with fewer than {_FEW_TEST_ROWS} test rows, each of which moves the client's result a lot; "
    "in a mean over clients it counts as much as any other"
)
_RECENT = 10_000  # clients whose held-out rows stay in memory


def partition(
    dataset: Dataset, config: SplitConfig, seed: int, local_clients: range | None = None
) -> Partition:
    """Divide ``dataset`` among clients, each with its own training, validation and test rows.

    A client's three splits have one distribution. The rows of an official test split go to the
    clients in proportion to their training rows of each class; rows of classes without training
    rows are left out. With natural clients its rows go to the clients that their column names
    instead; those of others are left out.
    Without an official test split, test rows are held out of each client's rows, by class as far as
    possible. One row stays for training before any is held out for validation, and one for
    validation before any is held out for test.

    ``config.max_examples`` limits training and validation rows together, and ``config.seed`` goes
    before ``seed``. ``local_clients`` are those whose rows these are, if other nodes have the
    others'; only the fractions, the limit and the seed of ``config`` apply then.

    Returns the rows of K clients, ascending, and a hash that is the same on every machine. The
    assignment takes a few bytes a row; held-out rows are computed on use. Raises InputError where
    the data don't allow the scheme; no natural client of the test rows is one of the training rows.

    >>> from fedtailor.data import DataConfig, load_data
    >>> parts = partition(load_data(DataConfig(name="digits")), SplitConfig(clients=3), seed=0)
    >>> [split.sizes().tolist() for split in (parts.train, parts.validation, parts.test)]
    [[431, 431, 431], [48, 48, 48], [120, 120, 120]]
    """
    seed = seed if config.seed is None else config.seed
    labels: Labels | None = dataset.class_numbers
    if labels is None:
        labels = np.broadcast_to(np.int64(0), len(dataset.inputs))
    clusters: Indices | None = None
    if local_clients is None:
        shares, clusters = schemes.assign(dataset, config, labels, seed)
    else:
        shares = schemes.assign_to_local(dataset, config, local_clients)
    clients = len(shares)
    empty = np.flatnonzero(shares.sizes() == 0)
    if local_clients is None and len(empty):
        raise InputError(
            f"client {empty[0]} has no examples (so have {len(empty)} of {clients} clients); "
            f"use fewer clients than {clients}"
        )
    groups = _client_groups(dataset, config, shares)
    nobodys = _of_nobody(dataset, config, shares)
    rest: Split = shares
    test: Split
    if dataset.num_train < len(dataset.inputs):
        rest = shares = _limited(shares, config, seed)
        test = _assign_test(dataset, groups, labels, shares, seed)
    else:
        spare = 2 if config.validation > 0 else 1
        rest = _Part(shares, labels, seed, "test", config.test, spare)
        test = replace(rest, held_out=True)
        if config.max_examples is not None:  # copies, so that rows without a use can be freed
            test = Shares.pack((test[client] for client in range(clients)), test.sizes())
            rest = _limited(rest, config, seed)
    train = _Part(rest, labels, seed, "validation", config.validation, 1)
    validation = replace(train, held_out=True)
    names, known = None, dataset.client_names
    if groups is not None and known is not None:
        names = tuple(known[group] if group >= 0 else "" for group in groups.tolist())
    parts = Partition(train, validation, test, digest="", clusters=clusters, names=names)
    omissions = [*nobodys, *_omissions(dataset, config, parts, groups, local_clients)]
    return replace(parts, digest=_digest(parts, config, seed), omissions=tuple(omissions))


def without_held_out(parts: Partition, leave_out: NDArray[np.bool_], what: str) -> Partition:
    """Leave rows, for each of which ``leave_out`` ``[N]`` is true, out of validation and test; they
    are no training rows either. ``what`` says why. Without such rows ``parts`` itself is returned;
    else its digest differs."""
    clients = range(len(parts.train))
    held_out = (parts.validation, parts.test)
    kept = [[rows[~leave_out[rows]] for rows in map(s.__getitem__, clients)] for s in held_out]
    validation, test = map(Shares.of, kept)
    less = parts.validation.sizes() - validation.sizes() + parts.test.sizes() - test.sizes()
    if not less.any():
        return parts
    digest = hashlib.sha256(parts.digest.encode())
    digest.update(np.packbits(leave_out[np.concatenate([s.rows for s in held_out])]).tobytes())
    without = np.flatnonzero(test.sizes() == 0) if len(parts.test.rows) else clients[:0]
    omissions = [o for o in parts.omissions if o.kind not in ("no-test-row", "few-test-rows")]
    omissions.append(of_held_out("trained-before", less, what, parts.names))
    omissions += of_clients("no-test-row", np.array(without), _NOT_SCORED, parts.names)
    is_told = parts.names is not None
    omissions += _few_test_rows(test, is_told | (test.sizes() < parts.test.sizes()), parts.names)
    return replace(
        parts,
        train=Shares.of([parts.train[client] for client in clients]),
        validation=validation,
        test=test,
        digest=digest.hexdigest(),
        omissions=tuple(omissions),
    )


def _client_groups(dataset: Dataset, config: SplitConfig, shares: Shares) -> Indices | None:
    """The natural client of each of K clients, -1 without rows; None with other schemes."""
    if config.scheme != "natural" or dataset.groups is None:
        return None
    groups = np.full(len(shares), -1, np.int64)
    clients = np.flatnonzero(shares.sizes())
    groups[clients] = dataset.groups[shares.values[shares.offsets[clients]]]
    return groups


def _of_nobody(dataset: Dataset, config: SplitConfig, shares: Shares) -> list[Omission]:
    """Tell of the training rows that a scheme by class gives to no client, and of lost classes."""
    labels = dataset.class_numbers
    if config.scheme == "natural" or labels is None or len(shares.values) == dataset.num_train:
        return []
    is_left = np.ones(dataset.num_train, bool)
    is_left[shares.values] = False
    train = labels[: dataset.num_train]
    lost = [dataset.classes[k] for k in np.setdiff1d(train, train[~is_left])]
    what = f"that split.scheme {config.scheme!r} gives to no client, left out"
    if lost:
        what += f"; no client has the class{'es' * (len(lost) > 1)} {listed(lost)}"
    return of_rows("no-client", np.flatnonzero(is_left), what, None, None)


def _omissions(
    dataset: Dataset,
    config: SplitConfig,
    parts: Partition,
    groups: Indices | None,
    local_clients: range | None,
) -> list[Omission]:
    """Describe the clients and the rows that the division leaves out."""
    first = dataset.num_train
    omissions: list[Omission] = []
    names = dataset.client_names
    if groups is not None and dataset.groups is not None and local_clients is None:
        sizes = np.bincount(dataset.groups[:first])
        too_small = np.flatnonzero((sizes > 0) & (sizes < config.min_examples))
        rows = "training rows" if first < len(dataset.inputs) else "rows"
        what = f"with fewer than {config.min_examples} {rows} (split.min_examples), left out"
        omissions += of_clients("min-examples", too_small, what, names, sizes[too_small])
        is_left = sizes >= config.min_examples
        is_left[groups] = False
        not_drawn = np.flatnonzero(is_left)
        what = f"not drawn (split.clients = {config.clients}), left out"
        omissions += of_clients("not-drawn", not_drawn, what, names)
    test_sizes = parts.test.sizes()
    if first < len(dataset.inputs):
        is_used = np.zeros(len(dataset.inputs) - first, bool)
        is_used[parts.test.rows - first] = True
        unused = first + np.flatnonzero(~is_used)
        if groups is not None and dataset.groups is not None:
            trained = np.unique(dataset.groups[:first])
            is_strange = ~np.isin(dataset.groups[unused], trained)
            what = (
                "of the test split of clients without training rows (which are of "
                f"{_of_groups(trained, dataset)}), left out"
            )
            strange, unused = unused[is_strange], unused[~is_strange]
            omissions += of_rows("no-client", strange, what, dataset.groups, names)
        what = "of the test split that belong to no client, left out"
        omissions += of_rows("no-client", unused, what, dataset.groups, names)
    without = np.flatnonzero(test_sizes == 0)
    if local_clients is not None:
        without = without[np.isin(without, local_clients)]
    if len(without) < len(test_sizes):  # else there is no test at all, as the experiment says
        omissions += of_clients("no-test-row", without, _NOT_SCORED, parts.names)
    if groups is not None:
        everyone = range(len(test_sizes))
        mine = np.isin(everyone, everyone if local_clients is None else local_clients)
        omissions += _few_test_rows(parts.test, mine, parts.names)
    return omissions


def _few_test_rows(
    test: Split, told: NDArray[np.bool_], names: tuple[str, ...] | None
) -> list[Omission]:
    """Tell of the clients, among those that are ``told`` of, whose result hangs on a few rows."""
    sizes = test.sizes()
    few = np.flatnonzero(told & (sizes > 0) & (sizes < _FEW_TEST_ROWS))
    return of_clients("few-test-rows", few, _FEW, names, sizes[few])


def _limited(split: Split, config: SplitConfig, seed: int) -> Shares:
    """Return at most ``config.max_examples`` of each client's rows."""
    limit = config.max_examples
    if limit is None:
        return split.shares

    def sample(client: int) -> Indices:
        if split.size(client) <= limit:
            return split[client]
        rng = random.generator(seed, "partition", "cap", client)
        return np.sort(rng.permutation(split[client])[:limit])

    return Shares.pack(map(sample, range(len(split))), np.minimum(split.sizes(), limit))


@dataclass(frozen=True)
class _Part:
    """The `Split` of the rows that are ``held_out``, or of the rest: of each client's rows in
    ``source`` a ``fraction`` is held out, one or more; but ``spare`` rows stay first."""

    source: Split
    labels: Labels
    seed: int
    purpose: str
    fraction: float
    spare: int
    held_out: bool = False
    recent: dict[int, tuple[Indices, Indices]] = field(default_factory=dict, repr=False)

    @property
    def shares(self) -> Shares:
        return self.source.shares

    @property
    def rows(self) -> Indices:
        return Shares.pack((self[client] for client in range(len(self))), self.sizes()).rows

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, client: int) -> Indices:
        if client not in self.recent:
            if len(self.recent) == _RECENT:
                self.recent.clear()
            self.recent[client] = self._divide(client)
        rest, held_out = self.recent[client]
        return held_out if self.held_out else rest

    def _divide(self, client: int) -> tuple[Indices, Indices]:
        rows = self.source[client]
        count = int(self._count(np.array(len(rows))))
        if count == 0:
            return rows, rows[:0]
        rng = random.generator(self.seed, "partition", self.purpose, client)
        return _hold_out(rows, self.labels[rows], count, rng)

    def size(self, client: int) -> int:
        return int(self._size(np.array(self.source.size(client))))

    def sizes(self) -> Rows:
        source_sizes = self.source.sizes()  # few sizes, many clients
        by_size = self._size(np.arange(source_sizes.max(initial=0) + 1))
        return by_size.astype(source_sizes.dtype)[source_sizes]

    def _size(self, source_size: Indices) -> Indices:
        count = self._count(source_size)
        return count if self.held_out else source_size - count

    def _count(self, sizes: Indices) -> Indices:
        """Return how many rows are held out of so many."""
        if self.fraction == 0:
            return np.zeros_like(sizes)
        target = np.maximum(1, np.rint(self.fraction * sizes).astype(np.int64))
        return np.clip(sizes - self.spare, 0, target)


def _hold_out(
    rows: Indices, labels: Labels, count: int, rng: np.random.Generator
) -> tuple[Indices, Indices]:
    """Return (rest, held-out rows): ``count`` rows, drawn from each class in proportion."""
    classes, sizes = np.unique(labels, return_counts=True)
    held_out = np.zeros(len(rows), dtype=bool)
    for name, number in zip(classes, _apportion(sizes, count, rng), strict=True):
        held_out[rng.permutation(np.flatnonzero(labels == name))[:number]] = True
    return rows[~held_out], rows[held_out]


def _apportion(weights: Indices, total: int, rng: np.random.Generator) -> Indices:
    """Divide ``total`` into whole numbers in proportion to ``weights``: the largest remainders are
    rounded up; ties are drawn."""
    numbers, remainders = np.divmod(total * weights, weights.sum())
    order = np.lexsort((rng.random(len(weights)), -remainders))
    numbers[order[: total - numbers.sum()]] += 1
    return numbers


def _assign_test(
    dataset: Dataset, groups: Indices | None, labels: Labels, shares: Shares, seed: int
) -> Shares:
    """Assign the rows of the official test split to the clients with ``shares`` of the others, who
    are the natural clients ``groups``, if any."""
    first = dataset.num_train
    if groups is not None and dataset.groups is not None:
        clients = np.flatnonzero(groups >= 0)
        known, wanted = groups[clients], dataset.groups[first:]  # known ones ascend
        positions = np.searchsorted(known, wanted).clip(max=len(known) - 1)
        owners = np.where(known[positions] == wanted, clients[positions], -1)
        if (owners == -1).all():
            raise InputError(
                "no client of the test rows is one of the training rows: the test rows have "
                f"{_of_groups(wanted, dataset)}, the training rows {_of_groups(known, dataset)}; "
                "spell them alike, or set data.test_split = 'none' to take test rows from each "
                "client's own"
            )
    else:
        owners = _owners_by_class(labels[first:], labels, shares, seed)
    return Shares.by_owner(owners, len(shares), first)


def _of_groups(groups: Indices, dataset: Dataset) -> str:
    """Name the first few of some natural clients."""
    numbers, names = np.unique(groups).tolist(), dataset.client_names
    return listed([names[number] if names else str(number) for number in numbers], few=5)


def _owners_by_class(test_labels: Labels, labels: Labels, shares: Shares, seed: int) -> Indices:
    """Draw the client of each test row, -1 for none, by its share of the class's training rows."""
    train_owners = np.repeat(np.arange(len(shares), dtype=np.int32), shares.sizes())
    train_labels = labels[shares.values]
    owners = np.full(len(test_labels), -1)
    for name in np.unique(test_labels):
        counts = np.bincount(train_owners[train_labels == name], minlength=len(shares))
        if counts.sum() > 0:
            rng = random.generator(seed, "partition", "official test", int(name))
            rows = rng.permutation(np.flatnonzero(test_labels == name))
            owners[rows] = np.repeat(np.arange(len(shares)), _apportion(counts, len(rows), rng))
    return owners


def _digest(parts: Partition, config: SplitConfig, seed: int) -> str:
    """Hash the assigned rows, and all that decides which of them are held out."""
    digest = hashlib.sha256(repr((seed, config.test, config.validation)).encode())
    arrays = [array for shares in parts.shares for array in (shares.offsets, shares.values)]
    for array in [*arrays, *([] if parts.clusters is None else [parts.clusters])]:
        digest.update(len(array).to_bytes(8, "little"))
        for start in range(0, len(array), _CHUNK):
            digest.update(array[start : start + _CHUNK].astype("<i8").tobytes())
    return digest.hexdigest()
