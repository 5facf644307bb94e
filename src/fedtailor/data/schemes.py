"""Which client holds which rows: the schemes of ``SplitConfig``.

IID, Dirichlet, pathological and shards give the rows that flwr-datasets' partitioners give for the
same order and seed (a test compares them), by whole arrays instead of client by client: a million
clients take seconds. The order of the rows is drawn by key.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from .. import random
from ..errors import InputError
from .config import SplitConfig
from .table import Dataset, Indices, Labels, Rows, Shares, row_type

Owners = NDArray[np.int32]  # [num_train]: the client of each row, -1 for none

_REDRAWS = 5  # generators for a Dirichlet partition
_TRIES = 11  # draws with each
_BLOCK = 1 << 18


def check(dataset: Dataset, config: SplitConfig, labels: Labels) -> None:
    """Raise InputError if the scheme can't be carried out; ``labels`` ``[N]``, zeros for none."""
    scheme, count = config.scheme, dataset.num_train
    if scheme == "natural":
        if dataset.groups is None:
            raise InputError("split.scheme 'natural' needs a client column; set data.client")
        return
    if config.clients is None:
        raise InputError(f"split.clients is missing; scheme {scheme!r} needs it")
    if config.clients > count:
        raise InputError(f"split.clients is {config.clients}, more than the {count} examples")
    if scheme == "iid":
        return
    if dataset.labels is None:
        raise InputError(f"split.scheme {scheme!r} needs labels; without: iid, natural")
    num_classes = int((np.bincount(labels[:count]) > 0).sum())
    checks: dict[str, Callable[[SplitConfig, int, int, int], None]] = {
        "dirichlet": _check_dirichlet,
        "pathological": _check_pathological,
        "shards": _check_shards,
        "clusters": _check_clusters,
    }
    checks[scheme](config, config.clients, count, num_classes)


def _check_dirichlet(config: SplitConfig, clients: int, count: int, num_classes: int) -> None:
    if not 0 < config.alpha < float("inf"):
        raise InputError(f"split.alpha must be above 0, got {config.alpha}")
    if clients * config.min_examples > count:
        raise InputError(
            f"split.min_examples {config.min_examples} for {clients} clients needs "
            f"{clients * config.min_examples} examples; there are {count}"
        )


def _check_pathological(config: SplitConfig, clients: int, count: int, num_classes: int) -> None:
    if config.classes_per_client > num_classes:
        raise InputError(
            f"split.classes_per_client is {config.classes_per_client}, more than the "
            f"{num_classes} classes"
        )


def _check_shards(config: SplitConfig, clients: int, count: int, num_classes: int) -> None:
    if clients * config.shards_per_client > count:
        raise InputError(
            f"{clients} clients with split.shards_per_client {config.shards_per_client} need "
            f"{clients * config.shards_per_client} examples; there are {count}"
        )


def _check_clusters(config: SplitConfig, clients: int, count: int, num_classes: int) -> None:
    if config.clusters > min(num_classes, clients):
        raise InputError(
            f"split.clusters is {config.clusters}, more than the {num_classes} classes or the "
            f"{clients} clients"
        )
    sizes = config.cluster_sizes
    if sizes is None:
        return
    if len(sizes) != config.clusters or sum(sizes) != clients or min(sizes) < 1:
        raise InputError(
            f"split.cluster_sizes {list(sizes)} must be {config.clusters} numbers of at least 1 "
            f"(split.clusters) that sum to {clients} (split.clients)"
        )


def deal(
    dataset: Dataset, config: SplitConfig, labels: Labels, seed: int
) -> tuple[Shares, Indices | None]:
    """The training rows of each of K clients, and the clients' clusters ``[K]``.

    ``dirichlet`` is balanced as in the code of Yurochkin et al. (ICML 2019): a client that has its
    even share gets none of the classes still to come. Left out are: with ``shards``, the rows,
    fewer than there are shards, that make these unequal; with ``pathological`` and fewer clients
    than classes, the classes no client drew; with ``natural``, clients with fewer than
    ``min_examples`` rows.

    Raises:
        InputError: not enough rows for what the scheme asks.
    """
    if config.scheme == "natural":
        assert dataset.groups is not None
        return _deal_natural(dataset.groups[: dataset.num_train], config, seed), None
    assert config.clients is not None
    rows = np.arange(dataset.num_train, dtype=row_type(dataset.num_train))
    random.generator(seed, "partition", "order").shuffle(rows)
    if config.scheme == "iid":
        return _deal_iid(rows, config.clients), None
    if config.scheme == "clusters":
        owner, clusters = _deal_clusters(rows, labels, config.clients, config, seed)
        return Shares.by_owner(owner, config.clients), clusters
    plain = {
        "dirichlet": _deal_dirichlet,
        "pathological": _deal_pathological,
        "shards": _deal_shards,
    }[config.scheme]
    owner = plain(rows, labels, config.clients, config, seed)
    return Shares.by_owner(owner, config.clients), None


def deal_own(dataset: Dataset, config: SplitConfig, own: range) -> Shares:
    """All training rows go to the clients ``own`` of ``config.clients``: to the one, or by the
    column that names them, in its order. The others hold nothing here.

    Raises:
        InputError: the column names fewer or more clients, or there is none for several.
    """
    groups, total = dataset.groups, config.clients
    if config.scheme != "natural" or total is None:
        raise InputError(
            f"a place with data of its own needs split.scheme 'natural' and split.clients; "
            f"scheme is {config.scheme!r}, clients {total}"
        )
    if not 0 <= own.start < own.stop <= total:
        raise InputError(f"clients {own.start} to {own.stop - 1} of {total}: no such clients")
    if groups is None and len(own) > 1:
        raise InputError(f"{len(own)} clients share these data; set data.client to tell them apart")
    if groups is None:
        groups = np.zeros(len(dataset.inputs), np.int64)
    names, groups = np.unique(groups[: dataset.num_train], return_inverse=True)
    if len(names) != len(own):
        raise InputError(
            f"the client column names {len(names)} clients; {len(own)} are served here"
        )
    return Shares.by_owner(groups + own.start, total)


def _give(owner: Owners, rows: Rows, clients: Indices, sizes: Indices) -> None:
    """The next ``sizes[i]`` of ``rows`` go to ``clients[i]``, for every i."""
    ends = np.cumsum(sizes)
    for start in range(0, int(ends[-1]), _BLOCK):
        part = rows[start : min(start + _BLOCK, int(ends[-1]))]
        at = np.searchsorted(ends, np.arange(start, start + len(part)), side="right")
        owner[part] = clients[at]


def _even(count: int, parts: int) -> Indices:
    """The sizes of ``parts`` near-equal parts, the larger ones first."""
    return np.full(parts, count // parts) + (np.arange(parts) < count % parts)


def _draw_seed(seed: int, *purpose: int | str) -> int:
    return int(random.generator(seed, "partition", *purpose).integers(2**63))


def _deal_iid(rows: Rows, clients: int) -> Shares:
    """Successive near-equal parts of ``rows``, each sorted in place."""
    size, larger = divmod(len(rows), clients)
    end = larger * (size + 1)
    rows[:end].reshape(larger, size + 1).sort(axis=1)
    rows[end:].reshape(clients - larger, size).sort(axis=1)
    ends = np.arange(clients + 1, dtype=rows.dtype)
    return Shares(rows, ends * size + np.minimum(ends, larger))


def _deal_dirichlet(
    rows: Rows, labels: Labels, clients: int, config: SplitConfig, seed: int
) -> Owners:
    sizes = np.bincount(labels[: len(rows)])
    for attempt in range(_REDRAWS):
        rng = np.random.default_rng(_draw_seed(seed, "dirichlet", attempt))
        for _ in range(_TRIES):
            shares = _dirichlet(sizes[sizes > 0], clients, config.alpha, rng)
            if shares is None:
                break
            if shares.sum(0).min() >= config.min_examples:
                owner = np.full(len(rows), -1, np.int32)
                for name, share in zip(np.flatnonzero(sizes), shares, strict=True):
                    _give(owner, rows[labels[rows] == name], np.arange(clients), share)
                return owner
    raise InputError(
        f"no Dirichlet partition with alpha {config.alpha} gives each of {clients} clients "
        f"{config.min_examples} examples; raise split.alpha, or lower split.min_examples or "
        "split.clients"
    )


def _dirichlet(
    sizes: Indices, clients: int, alpha: float, rng: np.random.Generator
) -> Indices | None:
    """Rows by class and client, ``[classes, K]``; None if the shares of a class are all zero."""
    total = np.zeros(clients, np.int64)
    shares = []
    for size in sizes:
        p = rng.dirichlet(np.full(clients, float(alpha)))
        p[total > sizes.sum() / clients] = 0
        whole = np.cumsum(p)[-1]
        if not whole > 0:
            return None
        ends = (np.cumsum(p / whole) * size).astype(np.int64)
        ends[-1] = size
        shares.append(np.diff(ends, prepend=0))
        total += shares[-1]
    return np.stack(shares)


def _deal_pathological(
    rows: Rows, labels: Labels, clients: int, config: SplitConfig, seed: int
) -> Owners:
    sizes = np.bincount(labels[: len(rows)])
    names = np.flatnonzero(sizes)
    rng = np.random.default_rng(_draw_seed(seed, "pathological"))
    drawn = _drawn_classes(clients, len(names), config.classes_per_client, rng)  # [K, classes]
    owner = np.full(len(rows), -1, np.int32)
    for number, name in enumerate(names):
        holders = np.flatnonzero((drawn == number).any(1))
        if len(holders) > sizes[name]:
            raise InputError(
                f"a class has fewer examples than clients drew it; {clients} clients with "
                f"{config.classes_per_client} classes each are too many: lower split.clients or "
                "split.classes_per_client"
            )
        if len(holders):
            own = rows[labels[rows] == name]
            _give(owner, own, holders, _even(len(own), len(holders)))
    return owner


def _drawn_classes(clients: int, num_classes: int, count: int, rng: np.random.Generator) -> Indices:
    """``count`` different classes a client, ``[K, count]``: client k has class k, going round, and
    others drawn until there are enough."""
    chosen = np.empty((clients, count), np.int64)
    lots: list[int] = []
    for client in range(clients):
        own = [client % num_classes]
        while len(own) < count:
            if not lots:
                lots = rng.integers(0, num_classes, size=4096).tolist()[::-1]
            lot = lots.pop()
            if lot not in own:
                own.append(lot)
        chosen[client] = own
    return chosen


def _deal_shards(
    rows: Rows, labels: Labels, clients: int, config: SplitConfig, seed: int
) -> Owners:
    shards = clients * config.shards_per_client
    # Left out from the end of the order, not of the last classes.
    used = rows[: len(rows) - len(rows) % shards]
    by_class = used[np.argsort(labels[used], kind="stable")]
    place = np.random.default_rng(_draw_seed(seed, "shards")).permutation(shards)
    holder = np.empty(shards, np.int64)
    holder[place] = np.repeat(np.arange(clients), config.shards_per_client)
    owner = np.full(len(rows), -1, np.int32)
    _give(owner, by_class, holder, np.full(shards, len(used) // shards))
    return owner


def _deal_natural(groups: Indices, config: SplitConfig, seed: int) -> Shares:
    sizes = np.bincount(groups)
    large = np.flatnonzero(sizes >= config.min_examples)
    wanted = len(large) if config.clients is None else config.clients
    if wanted > len(large) or wanted == 0:
        raise InputError(
            f"{len(large)} natural clients have split.min_examples {config.min_examples} or more "
            f"examples; split.clients asks for {max(wanted, 1)}"
        )
    kept = random.generator(seed, "partition", "natural").permutation(large)[:wanted]
    number = np.full(len(sizes), -1, np.int32)
    number[np.sort(kept)] = np.arange(wanted)
    return Shares.by_owner(number[groups], wanted)


def _deal_clusters(
    rows: Rows, labels: Labels, clients: int, config: SplitConfig, seed: int
) -> tuple[Owners, Indices]:
    sizes = config.cluster_sizes
    if sizes is None:
        sizes = tuple(_even(clients, config.clusters).tolist())
    rng = random.generator(seed, "partition", "clusters")
    groups = np.array_split(rng.permutation(np.unique(labels[rows])), config.clusters)
    owner = np.full(len(rows), -1, np.int32)
    clusters = np.repeat(np.arange(config.clusters), sizes)
    for number, (group, size) in enumerate(zip(groups, sizes, strict=True)):
        own = rows[np.isin(labels[rows], group)]
        _give(owner, own, np.flatnonzero(clusters == number), _even(len(own), size))
    return owner, clusters
