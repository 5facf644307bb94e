"""The schemes of ``SplitConfig``, which assign rows to clients.

IID, Dirichlet, pathological and shards assign the same rows as flwr-datasets' partitioners do for
the same order and seed (a test compares them), but by whole arrays instead of client by client: a
million clients take seconds. The order of the rows is drawn by key.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .. import random
from ..errors import InputError
from .config import SplitConfig
from .table import Dataset, Indices, Labels, Rows, Shares, row_type

Owners = NDArray[np.int32]  # [num_train]: the client of each row, -1 for none

_REDRAWS = 5  # generators for a Dirichlet partition
_TRIES = 11  # draws with each


def assign(
    dataset: Dataset, config: SplitConfig, labels: Labels, seed: int
) -> tuple[Shares, Indices | None]:
    """Assign the training rows to clients.

    ``dirichlet`` is balanced as in the code of Yurochkin et al. (ICML 2019): a client that has its
    even share gets none of the later classes. Some rows belong to no client: with ``shards``, the
    remainder of the division by the number of shards; with ``pathological`` and fewer clients than
    classes, the classes that no client drew; with ``natural``, the rows of clients with fewer than
    ``min_examples``.

    ``labels`` are class numbers ``[N]``; zeros if the data have no labels. Returns the rows of each
    of K clients, and the clients' clusters ``[K]``, if the scheme makes any. Raises InputError
    where the data don't allow the scheme."""
    scheme, count, clients = config.scheme, dataset.num_train, config.clients
    if scheme == "natural":
        if dataset.groups is None:
            raise InputError("split.scheme 'natural' needs a client column; set data.client")
        return _assign_natural(dataset.groups[:count], config, seed), None
    if clients is None:
        raise InputError(f"split.clients is missing; scheme {scheme!r} needs it")
    if clients > count:
        raise InputError(
            f"split.clients is {clients}, more than the {count} examples; allowed: 1 to {count}"
        )
    rows = np.arange(count, dtype=row_type(count))
    random.generator(seed, "partition", "order").shuffle(rows)
    if scheme == "iid":
        return _assign_iid(rows, clients), None
    if dataset.class_numbers is None:
        raise InputError(f"split.scheme {scheme!r} needs classes; without: iid, natural")
    if scheme == "clusters":
        owners, clusters = _assign_clusters(rows, labels, clients, config, seed)
        return Shares.by_owner(owners, clients), clusters
    assign_by_class = {
        "dirichlet": _assign_dirichlet,
        "pathological": _assign_pathological,
        "shards": _assign_shards,
    }[scheme]
    return Shares.by_owner(assign_by_class(rows, labels, clients, config, seed), clients), None


def _check_examples(count: int, clients: int, field: str, each: int) -> None:
    if clients * each > count:
        raise InputError(
            f"split.{field} {each} for {clients} clients needs {clients * each} examples; there "
            f"are {count}"
        )


def assign_to_local(dataset: Dataset, config: SplitConfig, local_clients: range) -> Shares:
    """Assign all training rows to the clients whose data this node has, by number. If there are
    several, the column of natural clients says whose they are, in sorted order. ``config`` has the
    number K of all clients; the others get no rows. Raises InputError where the column has fewer or
    more clients, or there is none for several clients."""
    groups, total = dataset.groups, config.clients
    if config.scheme != "natural" or total is None:
        raise InputError(
            "a node with data of its own needs split.scheme 'natural' and a number of "
            f"split.clients; got {config.scheme!r} and {total}"
        )
    start, stop = local_clients.start, local_clients.stop
    if not 0 <= start < stop <= total:
        raise InputError(
            f"clients {start} to {stop - 1} of {total}: no such clients; allowed: 0 to {total - 1}"
        )
    count = len(local_clients)
    if groups is None and count > 1:
        raise InputError(f"{count} clients share these data; set data.client to tell them apart")
    if groups is None:
        groups = np.zeros(len(dataset.inputs), np.int64)
    names, groups = np.unique(groups[: dataset.num_train], return_inverse=True)
    if len(names) != count:
        raise InputError(
            f"the client column names {len(names)} clients, but this node serves {count}: "
            f"{start} to {stop - 1}"
        )
    return Shares.by_owner(groups + start, total)


def _even_sizes(count: int, parts: int) -> Indices:
    """Return the sizes of ``parts`` near-equal parts, the larger ones first."""
    return np.full(parts, count // parts) + (np.arange(parts) < count % parts)


def _draw_seed(seed: int, *purpose: int | str) -> int:
    return int(random.generator(seed, "partition", *purpose).integers(2**63))


def _assign_iid(rows: Rows, clients: int) -> Shares:
    """Give every client the next of near-equal parts of ``rows``, each sorted in place."""
    size, larger = divmod(len(rows), clients)
    end = larger * (size + 1)
    rows[:end].reshape(larger, size + 1).sort(axis=1)
    rows[end:].reshape(clients - larger, size).sort(axis=1)
    ends = np.arange(clients + 1, dtype=rows.dtype)
    return Shares(rows, ends * size + np.minimum(ends, larger))


def _assign_dirichlet(
    rows: Rows, labels: Labels, clients: int, config: SplitConfig, seed: int
) -> Owners:
    _check_examples(len(rows), clients, "min_examples", config.min_examples)
    if not 0 < config.alpha < float("inf"):
        raise InputError(f"split.alpha must be above 0, got {config.alpha}")
    sizes = np.bincount(labels[: len(rows)])
    for attempt in range(_REDRAWS):
        rng = np.random.default_rng(_draw_seed(seed, "dirichlet", attempt))
        for _ in range(_TRIES):
            shares = _dirichlet(sizes[sizes > 0], clients, config.alpha, rng)
            if shares is None:
                break
            if shares.sum(0).min() >= config.min_examples:
                owners = np.full(len(rows), -1, np.int32)
                for name, share in zip(np.flatnonzero(sizes), shares, strict=True):
                    owners[rows[labels[rows] == name]] = np.repeat(np.arange(clients), share)
                return owners
    raise InputError(
        f"no Dirichlet partition with alpha {config.alpha} gives each of {clients} clients "
        f"{config.min_examples} examples; raise split.alpha, or lower split.min_examples or "
        "split.clients"
    )


def _dirichlet(
    sizes: Indices, clients: int, alpha: float, rng: np.random.Generator
) -> Indices | None:
    """Draw how many rows of each class each client gets, ``[classes, K]``; None: no shares."""
    total = np.zeros(clients, np.int64)
    shares = []
    for size in sizes:
        p = rng.dirichlet(np.full(clients, float(alpha)))
        p[total > sizes.sum() / clients] = 0
        p_sum = np.cumsum(p)[-1]
        if not p_sum > 0:
            return None
        ends = (np.cumsum(p / p_sum) * size).astype(np.int64)
        ends[-1] = size
        shares.append(np.diff(ends, prepend=0))
        total += shares[-1]
    return np.stack(shares)


def _assign_pathological(
    rows: Rows, labels: Labels, clients: int, config: SplitConfig, seed: int
) -> Owners:
    sizes = np.bincount(labels[: len(rows)])
    names = np.flatnonzero(sizes)
    if config.classes_per_client > len(names):
        raise InputError(
            f"split.classes_per_client is {config.classes_per_client}, more than the "
            f"{len(names)} classes"
        )
    rng = np.random.default_rng(_draw_seed(seed, "pathological"))
    classes = _draw_classes(clients, len(names), config.classes_per_client, rng)  # [K, count]
    owners = np.full(len(rows), -1, np.int32)
    for number, name in enumerate(names):
        class_clients = np.flatnonzero((classes == number).any(1))
        if len(class_clients) > sizes[name]:
            raise InputError(
                f"class {name} has {sizes[name]} examples, fewer than the {len(class_clients)} "
                f"clients that drew it; {clients} clients with {config.classes_per_client} classes "
                "each are too many: lower split.clients or split.classes_per_client"
            )
        if len(class_clients):
            class_rows = rows[labels[rows] == name]
            class_sizes = _even_sizes(len(class_rows), len(class_clients))
            owners[class_rows] = np.repeat(class_clients, class_sizes)
    return owners


def _draw_classes(clients: int, num_classes: int, count: int, rng: np.random.Generator) -> Indices:
    """Draw ``count`` different classes a client, ``[K, count]``; the first one of client k is class
    k modulo ``num_classes``."""
    classes = np.empty((clients, count), np.int64)
    draws: list[int] = []
    for client in range(clients):
        client_classes = [client % num_classes]
        while len(client_classes) < count:
            if not draws:
                draws = rng.integers(0, num_classes, size=4096).tolist()[::-1]
            draw = draws.pop()
            if draw not in client_classes:
                client_classes.append(draw)
        classes[client] = client_classes
    return classes


def _assign_shards(
    rows: Rows, labels: Labels, clients: int, config: SplitConfig, seed: int
) -> Owners:
    _check_examples(len(rows), clients, "shards_per_client", config.shards_per_client)
    shards = clients * config.shards_per_client
    # The remainder is left out from the end of the drawn order, not from the last classes.
    divisible = rows[: len(rows) - len(rows) % shards]
    by_class = divisible[np.argsort(labels[divisible], kind="stable")]
    order = np.random.default_rng(_draw_seed(seed, "shards")).permutation(shards)
    shard_clients = np.empty(shards, np.int32)
    shard_clients[order] = np.repeat(np.arange(clients), config.shards_per_client)
    owners = np.full(len(rows), -1, np.int32)
    owners[by_class] = np.repeat(shard_clients, len(divisible) // shards)
    return owners


def _assign_natural(groups: Indices, config: SplitConfig, seed: int) -> Shares:
    sizes = np.bincount(groups)
    large = np.flatnonzero(sizes >= config.min_examples)
    count = len(large) if config.clients is None else config.clients
    if count > len(large) or count == 0:
        asked = "" if config.clients is None else f", and split.clients is {config.clients}"
        raise InputError(
            f"{len(large)} clients have {config.min_examples} or more rows "
            f"(split.min_examples){asked}; the largest client has {sizes.max(initial=0)}"
        )
    sample = random.generator(seed, "partition", "natural").permutation(large)[:count]
    numbers = np.full(len(sizes), -1, np.int32)
    numbers[np.sort(sample)] = np.arange(count)
    return Shares.by_owner(numbers[groups], count)


def _assign_clusters(
    rows: Rows, labels: Labels, clients: int, config: SplitConfig, seed: int
) -> tuple[Owners, Indices]:
    classes, sizes = np.unique(labels[rows]), config.cluster_sizes
    if config.clusters > min(len(classes), clients):
        raise InputError(
            f"split.clusters is {config.clusters}, more than the {len(classes)} classes or the "
            f"{clients} clients"
        )
    if sizes is None:
        sizes = tuple(_even_sizes(clients, config.clusters).tolist())
    elif len(sizes) != config.clusters or sum(sizes) != clients or min(sizes) < 1:
        raise InputError(
            f"split.cluster_sizes {list(sizes)} must be {config.clusters} numbers of at least 1 "
            f"(split.clusters) that sum to {clients} (split.clients)"
        )
    rng = random.generator(seed, "partition", "clusters")
    groups = np.array_split(rng.permutation(classes), config.clusters)
    owners = np.full(len(rows), -1, np.int32)
    clusters = np.repeat(np.arange(config.clusters), sizes)
    for number, (group, size) in enumerate(zip(groups, sizes, strict=True)):
        cluster_rows = rows[np.isin(labels[rows], group)]
        cluster_clients = np.flatnonzero(clusters == number)
        row_counts = _even_sizes(len(cluster_rows), size)
        owners[cluster_rows] = np.repeat(cluster_clients, row_counts)
    return owners, clusters
