from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtailor.data import SplitConfig, partition
from fedtailor.data.partition import without_held_out
from fedtailor.errors import InputError
from tests.data.small import LABELLED, counts, rows_of, table, train_and_validation


@pytest.mark.slow
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
    own = np.array([counts(r8.labels[train_and_validation(parts, k)], 8) for k in range(12)])
    test = np.array([counts(r8.labels[parts.test[k]], 8) for k in range(12)])
    expected = own / own.sum(0) * counts(r8.labels[r8.num_train :], 8)
    assert np.abs(test - expected).max() < 1


@pytest.mark.parametrize("scheme", LABELLED)
def test_without_one_each_client_s_rows_are_cut_by_class(scheme, digits):
    config = SplitConfig(clients=7, scheme=scheme, test=0.25, validation=0.2)
    parts = partition(digits, config, seed=0)
    assert len(np.unique(rows_of(parts))) == len(rows_of(parts))
    for client in range(7):
        own = np.concatenate([train_and_validation(parts, client), parts.test[client]])
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


@pytest.mark.slow
def test_language_modelling_is_split_without_labels(chitchat):
    parts = partition(chitchat, SplitConfig(clients=7), seed=0)
    assert len(np.unique(rows_of(parts))) == chitchat.num_train


def test_natural_test_rows_go_to_their_client():
    groups = [0] * 10 + [1] * 12 + [2] * 3 + [0, 1, 1, 2, 3]
    parts = partition(table([0] * 30, 5, groups), SplitConfig(scheme="natural"), seed=0)
    assert [parts.test[client].tolist() for client in (0, 1)] == [[25], [26, 27]]


def test_test_rows_of_strangers_belong_to_nobody():
    groups = [0] * 10 + [1] * 10 + [7] * 6
    data = table([0] * 26, 6, groups)
    names = ("1", "2", *"abcde"[:4], "x", "1.0")
    strangers = r"the test rows have 1.0, the training rows 1, 2; spell them alike"
    with pytest.raises(InputError, match=strangers):
        partition(replace(data, client_names=names), SplitConfig(scheme="natural"), seed=0)
    some = replace(data, groups=np.array([*groups[:24], 1, 0]), client_names=names)
    parts = partition(some, SplitConfig(scheme="natural"), seed=0)
    assert [parts.test[client].tolist() for client in (0, 1)] == [[25], [24]]
    (strange,) = (one for one in parts.omissions if one.kind == "no-client")
    assert strange.text.startswith(
        "4 rows of the test split of clients without training rows (which are of 1, 2), left out"
    )


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


@pytest.mark.slow
@given(
    labels=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    num_test=st.integers(0, 20),
    config=SPLITS,
    seed=st.integers(0, 2**32),
)
@settings(max_examples=150, derandomize=True)
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
    some = np.concatenate([train_and_validation(parts, 0), parts.test[0]])
    assert np.array_equal(
        parts.counts(dataset.labels, 4, slice(0, 1))[0], counts(dataset.labels[some], 4)
    )


def test_clients_with_few_test_rows_left_are_named(digits):
    parts = partition(digits, SplitConfig(clients=3, test=0.25), seed=0)
    known = np.zeros(len(digits.inputs), bool)
    known[parts.test[1][:-4]] = True  # four are left
    known[parts.test[2][:9]] = True
    few = without_held_out(parts, known, "were seen").omissions[-1]
    assert few.kind == "few-test-rows"
    assert few.text.startswith("1 client with fewer than 5 test rows, each of which moves the ")
    assert few.text.endswith(": 1 (4)")
