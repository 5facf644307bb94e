"""Which client gets which rows, under every scheme."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from datasets import Dataset as Table

from fedtailor import random
from fedtailor.data import SplitConfig, partition
from fedtailor.errors import InputError
from tests.data.small import LABELLED, counts, rows_of, table, train_and_validation


def flower(scheme: str, config: SplitConfig, seed: int, table: Table) -> Any:
    from flwr_datasets import partitioner  # takes seconds

    drawn = int(random.generator(seed, "partition", *scheme.split()).integers(2**63))
    made = {
        "iid": lambda: partitioner.IidPartitioner(config.clients),
        "dirichlet 0": lambda: partitioner.DirichletPartitioner(
            config.clients,
            "by",
            config.alpha,
            min_partition_size=config.min_examples,
            self_balancing=True,
            seed=drawn,
        ),
        "pathological": lambda: partitioner.PathologicalPartitioner(
            config.clients,
            "by",
            config.classes_per_client,
            class_assignment_mode="first-deterministic",
            seed=drawn,
        ),
        "shards": lambda: partitioner.ShardPartitioner(
            config.clients, "by", config.shards_per_client, seed=drawn
        ),
    }[scheme]()
    made.dataset = table
    return made


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:The specified min_partition_size",
    "ignore:Classes.*NOT be used",
    "ignore:Specifying null_placement",
)
@pytest.mark.parametrize("scheme", ["iid", "dirichlet 0", "pathological", "shards"])
@pytest.mark.parametrize(("clients", "seed"), [(6, 0), (17, 1), (50, 2)])
def test_rows_are_dealt_as_flower_deals_them(scheme, clients, seed, digits):
    dataset = replace(digits, num_train=1500)
    config = SplitConfig(
        clients, scheme.split()[0], alpha=2.0, classes_per_client=3, shards_per_client=3,
        min_examples=2, validation=0,
    )  # fmt: skip
    rows = random.generator(seed, "partition", "order").permutation(1500)
    if scheme == "shards":
        rows = rows[: 1500 - 1500 % (3 * clients)]
    theirs = flower(scheme, config, seed, Table.from_dict({"row": rows, "by": digits.labels[rows]}))
    ours = partition(dataset, config, seed).train
    for client in range(clients):
        assert ours[client].tolist() == sorted(theirs.load_partition(client)["row"])


def test_iid_is_even(digits):
    parts = partition(digits, SplitConfig(clients=10, test=0, validation=0), seed=0)
    assert set(parts.train.sizes()) == {179, 180}
    assert len(parts.test.rows) == len(parts.validation.rows) == 0


def test_alpha_says_how_alike_clients_are(digits):
    def spread(alpha: float) -> float:
        config = SplitConfig(clients=10, scheme="dirichlet", alpha=alpha)
        parts = partition(digits, config, seed=0)
        shares = [counts(digits.labels[parts.train[k]], 10) for k in range(10)]
        return float(np.mean([np.std(share / share.sum()) for share in shares]))

    assert spread(0.1) > 2 * spread(1.0) > 4 * spread(100.0)


def test_pathological_clients_have_so_many_classes(digits):
    config = SplitConfig(clients=15, scheme="pathological", classes_per_client=3)
    parts = partition(digits, config, seed=0)
    assert {len(np.unique(digits.labels[train_and_validation(parts, k)])) for k in range(15)} == {3}


def test_fewer_clients_than_classes_leave_classes_out(digits):
    config = SplitConfig(clients=2, scheme="pathological", classes_per_client=2)
    parts = partition(digits, config, seed=0)
    kept = np.unique(digits.labels[rows_of(parts)])
    assert len(kept) <= 4
    (told,) = parts.omissions
    left = np.flatnonzero(~np.isin(digits.labels, kept))
    lost = ", ".join(map(str, np.unique(digits.labels[left])))
    assert told.text == (
        f"{len(left):,} rows that split.scheme 'pathological' gives to no client, left out; no "
        f"client has the classes {lost}"
    )
    (over,) = partition(digits, SplitConfig(clients=100, scheme="shards"), seed=0).omissions
    assert over.text == "197 rows that split.scheme 'shards' gives to no client, left out"
    assert not partition(digits, SplitConfig(clients=100), seed=0).omissions


def test_shards_have_one_size_and_keep_every_class(digits):
    config = SplitConfig(clients=100, scheme="shards", shards_per_client=10, test=0)
    parts = partition(digits, config, seed=0)
    assert set(parts.train.sizes() + parts.validation.sizes()) == {10}
    assert len(np.unique(digits.labels[rows_of(parts)])) == 10


@pytest.mark.parametrize(("sizes", "expected"), [(None, (4, 4, 3)), ((2, 8, 1), (2, 8, 1))])
def test_clusters_share_no_class(sizes, expected, digits):
    config = SplitConfig(clients=11, scheme="clusters", clusters=3, cluster_sizes=sizes)
    parts = partition(digits, config, seed=0)
    assert tuple(np.bincount(parts.clusters)) == expected
    assert len(rows_of(parts)) == digits.num_train
    classes = [
        set(
            np.concatenate(
                [digits.labels[train_and_validation(parts, k)] for k in np.flatnonzero(own)]
            )
        )
        for own in (parts.clusters == number for number in range(3))
    ]
    assert sum(map(len, classes)) == len(set.union(*classes)) == 10


@pytest.mark.slow
def test_natural_clients_keep_their_rows(chitchat):
    parts = partition(chitchat, SplitConfig(scheme="natural", min_examples=20), seed=0)
    sizes = np.bincount(chitchat.groups)
    assert len(parts.train) == (sizes >= 20).sum()
    for client in range(len(parts.train)):
        own = np.concatenate([train_and_validation(parts, client), parts.test[client]])
        group = chitchat.groups[own[0]]
        assert np.array_equal(np.sort(own), np.flatnonzero(chitchat.groups == group))


@pytest.mark.slow
def test_some_natural_clients_are_drawn(chitchat):
    config = SplitConfig(scheme="natural", clients=6, min_examples=20, max_examples=12)
    drawn = [
        {int(chitchat.groups[rows[0]]) for rows in map(parts.train.__getitem__, range(6))}
        for parts in (partition(chitchat, config, seed) for seed in (0, 0, 1))
    ]
    assert len(drawn[0]) == 6
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clients": None}, "split.clients is missing; scheme 'iid' needs it"),
        ({"clients": 31}, "split.clients is 31, more than the 30 examples"),
        ({"scheme": "natural"}, "'natural' needs a client column; set data.client"),
        ({"scheme": "dirichlet", "alpha": 0.0}, "split.alpha must be above 0, got 0.0"),
        ({"scheme": "dirichlet", "alpha": float("nan")}, "split.alpha must be above 0, got nan"),
        ({"scheme": "dirichlet", "clients": 4}, "for 4 clients needs 40 examples; there are 30"),
        (
            {"scheme": "dirichlet", "alpha": 0.01, "clients": 2, "min_examples": 15},
            "alpha 0.01 gives each of 2 clients 15 examples; raise split.alpha",
        ),
        (
            {"scheme": "pathological", "classes_per_client": 4},
            "split.classes_per_client is 4, more than the 3 classes",
        ),
        (
            {"scheme": "pathological", "clients": 30},
            "lower split.clients or split.classes_per_client",
        ),
        (
            {"scheme": "shards", "shards_per_client": 11},
            "split.shards_per_client 11 for 3 clients needs 33 examples; there are 30",
        ),
        ({"scheme": "clusters"}, "split.clusters is 5, more than the 3 classes or the 3 clients"),
        (
            {"scheme": "clusters", "clusters": 2, "cluster_sizes": (1, 1, 1)},
            r"cluster_sizes \[1, 1, 1\] must be 2 numbers of at least 1",
        ),
        (
            {"scheme": "clusters", "clusters": 2, "cluster_sizes": (1, 3)},
            r"\(split.clusters\) that sum to 3 \(split.clients\)",
        ),
        (
            {"scheme": "clusters", "clusters": 2, "cluster_sizes": (0, 3)},
            "must be 2 numbers of at least 1",
        ),
        (
            {"scheme": "clusters", "clusters": 3, "clients": 29, "cluster_sizes": (27, 1, 1)},
            r"client \d+ has no examples \(so have 17 of 29 clients\); use fewer clients than 29",
        ),
    ],
)
def test_what_can_t_be_done(settings, message):
    dataset = table([0, 1, 2] * 10)
    config = SplitConfig(**({"clients": 3} | settings))
    with pytest.raises(InputError, match=message):
        partition(dataset, config, seed=0)


def test_natural_needs_enough_clients():
    dataset = table([0] * 25, groups=[0] * 12 + [1] * 10 + [2] * 3)
    with pytest.raises(
        InputError, match=r"2 clients have 10 or more .* split\.clients is 3; .* has "
    ):
        partition(dataset, SplitConfig(scheme="natural", clients=3), seed=0)
    with pytest.raises(InputError, match="0 clients have"):
        partition(dataset, SplitConfig(scheme="natural", min_examples=50), seed=0)


@pytest.mark.parametrize("scheme", LABELLED[1:])
def test_language_modelling_has_no_classes_to_split_by(scheme, chitchat):
    with pytest.raises(InputError, match=f"{scheme!r} needs classes; without: iid, natural"):
        partition(chitchat, SplitConfig(clients=3, scheme=scheme), seed=0)
