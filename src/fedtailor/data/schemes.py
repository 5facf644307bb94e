"""Which client holds which rows: the schemes of ``SplitConfig``.

IID, Dirichlet, pathological, shards and natural ids are the partitioners of flwr-datasets, given
the rows in an order drawn by key. ``clusters`` is written here.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import random
from ..errors import InputError
from .config import SplitConfig
from .table import Dataset, Indices

_EXPECTED = (
    "The specified min_partition_size",  # Dirichlet: it draws again
    "Classes: .* will NOT be used",  # pathological: as documented
    "Specifying null_placement",  # pyarrow, of the way datasets sorts
)
_REDRAWS = 5  # of a Dirichlet partition, each with flwr-datasets' own 11 attempts


def check(dataset: Dataset, config: SplitConfig, labels: Indices) -> None:
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
    num_classes = len(np.unique(labels[:count]))
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
    dataset: Dataset, config: SplitConfig, labels: Indices, seed: int
) -> tuple[list[Indices], Indices | None]:
    """The training rows of each of K clients, ascending, and the clients' clusters ``[K]``.

    ``dirichlet`` is balanced as in the code of Yurochkin et al. (ICML 2019): a client that has its
    even share gets none of the classes still to come. Left out are: with ``shards``, the rows,
    fewer than there are shards, that make these unequal; with ``pathological`` and fewer clients
    than classes, the classes no client drew; with ``natural``, clients with fewer than
    ``min_examples`` rows.

    Raises:
        InputError: not enough rows for what the scheme asks.
    """
    rows = random.generator(seed, "partition", "order").permutation(dataset.num_train)
    if config.scheme == "natural":
        assert dataset.groups is not None
        return _deal_natural(rows, dataset.groups, config, seed), None
    assert config.clients is not None
    if config.scheme == "clusters":
        return _deal_clusters(rows, labels, config.clients, config, seed)
    plain = {
        "iid": _deal_iid,
        "dirichlet": _deal_dirichlet,
        "pathological": _deal_pathological,
        "shards": _deal_shards,
    }[config.scheme]
    return plain(rows, labels, config.clients, config, seed), None


def _flower(partitioner: Any, rows: Indices, column: Indices) -> list[Indices]:
    """What a flwr-datasets partitioner makes of ``rows``, given the values it divides by."""
    from datasets import Dataset as Table

    partitioner.dataset = Table.from_dict({"index": rows, "by": column[rows]})
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):  # a progress bar
        for message in _EXPECTED:
            warnings.filterwarnings("ignore", message)
        parts = [partitioner.load_partition(k) for k in range(partitioner.num_partitions)]
    return [np.sort(part.with_format("numpy")["index"][:]) for part in parts]


def _draw_seed(seed: int, *purpose: int | str) -> int:
    return int(random.generator(seed, "partition", *purpose).integers(2**63))


def _deal_iid(
    rows: Indices, labels: Indices, clients: int, config: SplitConfig, seed: int
) -> list[Indices]:
    from flwr_datasets.partitioner import IidPartitioner

    return _flower(IidPartitioner(clients), rows, labels)


def _deal_dirichlet(
    rows: Indices, labels: Indices, clients: int, config: SplitConfig, seed: int
) -> list[Indices]:
    from flwr_datasets.partitioner import DirichletPartitioner

    for attempt in range(_REDRAWS):
        partitioner = DirichletPartitioner(
            clients,
            "by",
            float(config.alpha),
            min_partition_size=config.min_examples,
            self_balancing=True,
            seed=_draw_seed(seed, "dirichlet", attempt),
        )
        with np.errstate(divide="raise", invalid="raise"):
            try:
                return _flower(partitioner, rows, labels)
            except (ValueError, FloatingPointError):  # too few examples; all shares zero
                continue
    raise InputError(
        f"no Dirichlet partition with alpha {config.alpha} gives each of {clients} clients "
        f"{config.min_examples} examples; raise split.alpha, or lower split.min_examples or "
        "split.clients"
    )


def _deal_pathological(
    rows: Indices, labels: Indices, clients: int, config: SplitConfig, seed: int
) -> list[Indices]:
    from flwr_datasets.partitioner import PathologicalPartitioner

    partitioner = PathologicalPartitioner(
        clients,
        "by",
        config.classes_per_client,
        class_assignment_mode="first-deterministic",
        seed=_draw_seed(seed, "pathological"),
    )
    try:
        return _flower(partitioner, rows, labels)
    except ValueError as error:
        raise InputError(
            f"a class has fewer examples than clients drew it; {clients} clients with "
            f"{config.classes_per_client} classes each are too many: lower split.clients or "
            "split.classes_per_client"
        ) from error


def _deal_shards(
    rows: Indices, labels: Indices, clients: int, config: SplitConfig, seed: int
) -> list[Indices]:
    from flwr_datasets.partitioner import ShardPartitioner

    shards = clients * config.shards_per_client
    partitioner = ShardPartitioner(
        clients, "by", config.shards_per_client, seed=_draw_seed(seed, "shards")
    )
    # Left to itself it drops the remainder from the end, which is all of the last classes.
    return _flower(partitioner, rows[: len(rows) - len(rows) % shards], labels)


def _deal_natural(rows: Indices, groups: Indices, config: SplitConfig, seed: int) -> list[Indices]:
    from flwr_datasets.partitioner import NaturalIdPartitioner

    large = np.flatnonzero(np.bincount(groups[rows]) >= config.min_examples)
    wanted = len(large) if config.clients is None else config.clients
    if wanted > len(large) or wanted == 0:
        raise InputError(
            f"{len(large)} natural clients have split.min_examples {config.min_examples} or more "
            f"examples; split.clients asks for {max(wanted, 1)}"
        )
    kept = random.generator(seed, "partition", "natural").permutation(large)[:wanted]
    return _flower(NaturalIdPartitioner("by"), rows[np.isin(groups[rows], kept)], groups)


def _deal_clusters(
    rows: Indices, labels: Indices, clients: int, config: SplitConfig, seed: int
) -> tuple[list[Indices], Indices]:
    sizes = config.cluster_sizes
    if sizes is None:
        sizes = tuple(map(len, np.array_split(np.arange(clients), config.clusters)))
    rng = random.generator(seed, "partition", "clusters")
    groups = np.array_split(rng.permutation(np.unique(labels[rows])), config.clusters)
    owned: list[Indices] = []
    for group, size in zip(groups, sizes, strict=True):
        own = rows[np.isin(labels[rows], group)]
        owned += [np.sort(part) for part in np.array_split(own, size)]
    return owned, np.repeat(np.arange(config.clusters), sizes)
