from dataclasses import replace

import numpy as np
import pytest
from datasets import Dataset as Table
from flwr_datasets.partitioner import (
    DirichletPartitioner,
    IidPartitioner,
    Partitioner,
    PathologicalPartitioner,
    ShardPartitioner,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtailor import random
from fedtailor.data import Dataset, Partition, SplitConfig, partition
from fedtailor.data.table import Images
from fedtailor.errors import InputError

LABELLED = ("iid", "dirichlet", "pathological", "shards", "clusters")


def rows_of(parts: Partition) -> np.ndarray:
    return np.concatenate([parts.train.rows, parts.validation.rows, parts.test.rows])


def table(labels, num_test=0, groups=None) -> Dataset:
    labels = np.asarray(labels, np.int64)
    return Dataset(
        Images(np.zeros((len(labels), 1, 1, 1), np.uint8)),
        len(labels) - num_test,
        "classification",
        "",
        labels,
        tuple(map(str, range(int(labels.max(initial=0)) + 1))),
        None if groups is None else np.asarray(groups, np.int64),
    )


def held(parts: Partition, client: int) -> np.ndarray:
    return np.concatenate([parts.train[client], parts.validation[client]])


def counts(labels: np.ndarray, num_classes: int) -> np.ndarray:
    return np.bincount(labels, minlength=num_classes)


@pytest.mark.parametrize("scheme", LABELLED)
def test_the_official_test_split_stays_test_and_whole(scheme, r8):
    parts = partition(r8, SplitConfig(clients=12, scheme=scheme, clusters=4), seed=1)
    assert len(parts.train) == len(parts.validation) == len(parts.test) == 12
    assert len(np.unique(rows_of(parts))) == len(rows_of(parts))
    assert np.array_equal(np.sort(parts.test.rows), np.arange(r8.num_train, len(r8.inputs)))
    missing = r8.num_train - len(parts.train.rows) - len(parts.validation.rows)
    assert missing == (r8.num_train % 24 if scheme == "shards" else 0)
    assert parts.train.sizes().min() > 0


@pytest.mark.parametrize("scheme", LABELLED)
def test_a_client_s_test_rows_follow_its_training_rows(scheme, r8):
    parts = partition(r8, SplitConfig(clients=12, scheme=scheme, clusters=4), seed=1)
    own = np.array([counts(r8.labels[held(parts, k)], 8) for k in range(12)])
    test = np.array([counts(r8.labels[parts.test[k]], 8) for k in range(12)])
    expected = own / own.sum(0) * counts(r8.labels[r8.num_train :], 8)
    assert np.abs(test - expected).max() < 1


@pytest.mark.parametrize("scheme", LABELLED)
def test_without_one_each_client_s_rows_are_cut_by_class(scheme, digits):
    config = SplitConfig(clients=7, scheme=scheme, test=0.25, validation=0.2)
    parts = partition(digits, config, seed=0)
    assert len(np.unique(rows_of(parts))) == len(rows_of(parts))
    for client in range(7):
        own = np.concatenate([held(parts, client), parts.test[client]])
        whole, test, validation = (
            counts(digits.labels[rows], 10)
            for rows in (own, parts.test[client], parts.validation[client])
        )
        assert len(parts.test[client]) == round(0.25 * len(own))
        assert np.abs(test - whole * len(parts.test[client]) / len(own)).max() < 1
        rest = whole - test
        assert len(parts.validation[client]) == round(0.2 * rest.sum())
        assert np.abs(validation - rest * len(parts.validation[client]) / rest.sum()).max() < 1


@pytest.mark.parametrize("scheme", LABELLED)
def test_the_seed_decides(scheme, digits):
    config = SplitConfig(clients=9, scheme=scheme)
    digests = [partition(digits, config, seed).digest for seed in (0, 0, 1)]
    assert digests[0] == digests[1] != digests[2]
    pinned = replace(config, seed=1)
    assert {partition(digits, pinned, seed).digest for seed in (0, 1)} == {digests[2]}


def test_the_digest_is_the_same_on_every_machine():
    parts = partition(table([0, 1] * 6), SplitConfig(clients=2), seed=0)
    assert parts.digest == "35e6d82db26a3a88f532495ae178f37638ec58fd3faf6995d3e56a53fec48eec"
    assert parts.train.rows.dtype == np.int64


def flower(scheme: str, config: SplitConfig, seed: int, table: Table) -> Partitioner:
    drawn = int(random.generator(seed, "partition", *scheme.split()).integers(2**63))
    made = {
        "iid": lambda: IidPartitioner(config.clients),
        "dirichlet 0": lambda: DirichletPartitioner(
            config.clients,
            "by",
            config.alpha,
            min_partition_size=config.min_examples,
            self_balancing=True,
            seed=drawn,
        ),
        "pathological": lambda: PathologicalPartitioner(
            config.clients,
            "by",
            config.classes_per_client,
            class_assignment_mode="first-deterministic",
            seed=drawn,
        ),
        "shards": lambda: ShardPartitioner(
            config.clients, "by", config.shards_per_client, seed=drawn
        ),
    }[scheme]()
    made.dataset = table
    return made


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
    assert {len(np.unique(digits.labels[held(parts, k)])) for k in range(15)} == {3}


def test_fewer_clients_than_classes_leave_classes_out(digits):
    config = SplitConfig(clients=2, scheme="pathological", classes_per_client=2)
    parts = partition(digits, config, seed=0)
    assert len(np.unique(digits.labels[rows_of(parts)])) <= 4


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
        set(np.concatenate([digits.labels[held(parts, k)] for k in np.flatnonzero(own)]))
        for own in (parts.clusters == number for number in range(3))
    ]
    assert sum(map(len, classes)) == len(set.union(*classes)) == 10


def test_natural_clients_keep_their_rows(chitchat):
    parts = partition(chitchat, SplitConfig(scheme="natural", min_examples=20), seed=0)
    sizes = np.bincount(chitchat.groups)
    assert len(parts.train) == (sizes >= 20).sum()
    for client in range(len(parts.train)):
        own = np.concatenate([held(parts, client), parts.test[client]])
        group = chitchat.groups[own[0]]
        assert np.array_equal(np.sort(own), np.flatnonzero(chitchat.groups == group))


def test_some_natural_clients_are_drawn(chitchat):
    config = SplitConfig(scheme="natural", clients=6, min_examples=20, max_examples=12)
    drawn = [
        {int(chitchat.groups[rows[0]]) for rows in map(parts.train.__getitem__, range(6))}
        for parts in (partition(chitchat, config, seed) for seed in (0, 0, 1))
    ]
    assert len(drawn[0]) == 6
    assert drawn[0] == drawn[1] != drawn[2]


def test_language_modelling_is_split_without_labels(chitchat):
    parts = partition(chitchat, SplitConfig(clients=7), seed=0)
    assert len(np.unique(rows_of(parts))) == chitchat.num_train


def test_natural_test_rows_go_to_their_client():
    groups = [0] * 10 + [1] * 12 + [2] * 3 + [0, 1, 1, 2, 3]
    parts = partition(table([0] * 30, 5, groups), SplitConfig(scheme="natural"), seed=0)
    assert [parts.test[client].tolist() for client in (0, 1)] == [[25], [26, 27]]


def test_test_rows_of_strangers_are_dealt_by_class():
    groups = [0] * 10 + [1] * 10 + [7] * 6
    labels = [0] * 10 + [1] * 10 + [0, 1, 1, 1, 2, 2]
    parts = partition(table(labels, 6, groups), SplitConfig(scheme="natural"), seed=0)
    assert [parts.test[client].tolist() for client in (0, 1)] == [[20], [21, 22, 23]]


def test_max_examples_caps_training_and_validation(digits, r8):
    for dataset, tests in ((digits, len(digits.inputs) * 0.2), (r8, 2189)):
        config = SplitConfig(clients=5, max_examples=40, validation=0.25)
        parts = partition(dataset, config, seed=0)
        assert parts.train.sizes().tolist() == [30] * 5
        assert parts.validation.sizes().tolist() == [10] * 5
        assert abs(len(parts.test.rows) - tests) < 5


@pytest.mark.parametrize(
    ("rows", "validation", "test", "expected"),
    [
        (1, 0.5, 0.5, (1, 0, 0)),
        (2, 0.1, 0.2, (1, 1, 0)),
        (2, 0.0, 0.2, (1, 0, 1)),
        (3, 0.1, 0.2, (1, 1, 1)),
        (3, 0.9, 0.9, (1, 1, 1)),
        (10, 0.1, 0.2, (7, 1, 2)),
        (10, 0.0, 0.0, (10, 0, 0)),
    ],
)
def test_tiny_clients_train_first_then_validate(rows, validation, test, expected):
    config = SplitConfig(clients=1, validation=validation, test=test)
    parts = partition(table([0] * rows), config, seed=0)
    assert (len(parts.train[0]), len(parts.validation[0]), len(parts.test[0])) == expected


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
            "split.shards_per_client 11 need 33 examples; there are 30",
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
    with pytest.raises(InputError, match=r"2 natural clients have .* 10 or more .* asks for 3"):
        partition(dataset, SplitConfig(scheme="natural", clients=3), seed=0)
    with pytest.raises(InputError, match="0 natural clients have"):
        partition(dataset, SplitConfig(scheme="natural", min_examples=50), seed=0)


@pytest.mark.parametrize("scheme", LABELLED[1:])
def test_language_modelling_has_no_classes_to_split_by(scheme, chitchat):
    with pytest.raises(InputError, match=f"{scheme!r} needs labels; without: iid, natural"):
        partition(chitchat, SplitConfig(clients=3, scheme=scheme), seed=0)


SPLITS = st.builds(
    SplitConfig,
    clients=st.integers(1, 12),
    scheme=st.sampled_from((*LABELLED, "natural")),
    alpha=st.sampled_from((0.0001, 0.5, 10.0)),
    classes_per_client=st.integers(1, 3),
    shards_per_client=st.integers(1, 3),
    clusters=st.integers(1, 3),
    min_examples=st.integers(1, 3),
    max_examples=st.none() | st.integers(1, 9),
    validation=st.sampled_from((0.0, 0.1, 0.5)),
    test=st.sampled_from((0.0, 0.2, 0.9)),
)


@given(
    labels=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    num_test=st.integers(0, 20),
    config=SPLITS,
    seed=st.integers(0, 2**32),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_any_partition_holds_what_it_must(labels, num_test, config, seed):
    groups = np.arange(len(labels)) * 7 % 5
    dataset = table(labels, min(num_test, len(labels) - 1), groups)
    try:
        parts = partition(dataset, config, seed)
    except InputError:
        return
    assert len(parts.train) == config.clients
    rows = rows_of(parts)
    assert len(np.unique(rows)) == len(rows)
    own = parts.train.sizes() + parts.validation.sizes()
    assert parts.train.sizes().min() >= 1
    assert own.max() <= (config.max_examples or len(labels))
    assert ((parts.validation.sizes() > 0) == ((own > 1) & (config.validation > 0))).all()
    assert max(parts.train.rows.max(), parts.validation.rows.max(initial=0)) < dataset.num_train
    if dataset.num_train < len(labels):
        assert parts.test.rows.min(initial=len(labels)) >= dataset.num_train
        if config.scheme != "natural":
            trained = dataset.labels[np.concatenate([parts.train.rows, parts.validation.rows])]
            given_out = np.isin(dataset.labels[dataset.num_train :], trained)
            assert len(parts.test.rows) == given_out.sum()
    assert parts.digest == partition(dataset, config, seed).digest
    for split in (parts.train, parts.validation, parts.test):
        assert [split.size(k) for k in range(config.clients)] == split.sizes().tolist()
        assert [len(split[k]) for k in range(config.clients)] == split.sizes().tolist()
        assert np.array_equal(split.rows, np.concatenate([split[k] for k in range(config.clients)]))
    assert np.array_equal(parts.rows, np.unique(rows))
    count = parts.counts(dataset.labels, 4, slice(None))
    assert np.array_equal(count.sum(0), counts(dataset.labels[rows], 4))
    some = np.concatenate([held(parts, 0), parts.test[0]])
    assert np.array_equal(
        parts.counts(dataset.labels, 4, slice(0, 1))[0], counts(dataset.labels[some], 4)
    )
