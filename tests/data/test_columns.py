import numpy as np
import pytest
from datasets import Dataset as Table

from fedtailor.data import DataConfig
from fedtailor.data.columns import Columns, of_tables
from fedtailor.data.natural_clients import columns_of_client, encode_clients
from fedtailor.errors import InputError
from tests.data.labels import encode_labels


def columns(train, test=(), classes=(), clients=None):
    labels = [*train, *test]
    return Columns(lambda rows: [], len(train), len(test), labels, classes, clients)


def test_text_labels_are_numbered_in_sorted_order():
    numbers, names = encode_labels(columns(["ship", "acq", "ship"], ["acq"]))
    assert names == ("acq", "ship")
    assert numbers.tolist() == [1, 0, 1, 0]
    assert numbers.dtype == np.int64


@pytest.mark.parametrize(
    ("train", "classes", "expected", "numbers"),
    [
        ([2, 0, 2], (), ("0", "2"), [1, 0, 1]),
        ([-1, 1, 1], (), ("-1", "1"), [0, 1, 1]),
        ([1.0, 0.0], (), ("0", "1"), [1, 0]),
        ([20_000_000, -(10**15)], (), ("-1000000000000000", "20000000"), [1, 0]),
        ([7, 9], ("9", "8", "7"), ("9", "8", "7"), [2, 0]),  # by name
        ([True, False], (), ("False", "True"), [1, 0]),
        ([2, 0], ("a", "b", "c"), ("a", "b", "c"), [2, 0]),  # by number
    ],
)
def test_integer_labels_are_counted(train, classes, expected, numbers):
    encoded, names = encode_labels(columns(train), classes)
    assert (names, encoded.tolist()) == (expected, numbers)


def test_an_id_column_is_no_label():
    with pytest.raises(InputError, match="500 labels in 500 rows, as many classes as rows"):
        encode_labels(columns([*range(500)]))
    with pytest.raises(
        InputError, match="unknown label 0 in row 1 of the training rows; allowed: 1, 2"
    ):
        encode_labels(columns([0, 1]), ("1", "2"))  # a part of them is named: none is a position
    encode_labels(columns([*range(21)]), tuple(map(str, range(21))))


def test_named_classes_count_even_if_absent():
    assert encode_labels(columns([0], [1], ("cat", "dog")))[1] == ("cat", "dog")


def test_declared_classes_count_even_if_absent():
    declared = ("ship", "grain", "acq")
    numbers, names = encode_labels(columns(["acq", "ship"], ["acq"]), declared)
    assert names == declared
    assert numbers.tolist() == [2, 0, 2]
    assert encode_labels(columns([1, 0]), declared)[0].tolist() == [1, 0]
    by_name, _ = encode_labels(columns([0, 1], classes=("acq", "grain")), declared)
    assert by_name.tolist() == [2, 1]


@pytest.mark.parametrize(
    ("train", "classes", "message"),
    [
        (["acq", "tin"], (), "'tin' in row 2 of the training rows; allowed: acq, ship"),
        ([0, 2], (), "2 in row 2 of the training rows; allowed: 0 to 1"),
        ([0, 1], ("acq", "tin"), "'tin' in row 2 of the training rows; allowed: acq, ship"),
    ],
)
def test_labels_outside_of_the_declared_classes_are_refused(train, classes, message):
    with pytest.raises(InputError, match=message):
        encode_labels(columns(train, classes=classes), ("acq", "ship"))


@pytest.mark.parametrize(
    ("train", "test", "classes", "message"),
    [
        (
            [0, 1],
            ["a\u0308"],
            ("\u00e4", "b"),
            r"'a\\u0308' \(which prints like '\\xe4'\) in row 1 of the",
        ),
        ([0, 2], [1], (), "unknown label 1 in row 1 of the test rows; allowed: 0, 2"),
        (
            [0, 1],
            [0, -1, 3, -1],
            ("a", "b"),
            r"-1 in row 2 of the test rows; allowed: 0 to 1; 3 rows have such labels: -1 \(2\), 3",
        ),
        ([0, 2], [], ("a", "b"), "unknown label 2 in row 2 of the training rows; allowed: 0 to 1"),
        ([0, 1], [2], (), "unknown label 2 in row 1 of the test rows; allowed: 0 to 1"),
        (["a", "b"], ["c"], (), "unknown label 'c' in row 1 of the test rows; allowed: a, b"),
        ([0, 1], [None, " "], (), "no row of the test split has a label"),
        ([None, ""], [0], (), "no row of the training split has a label"),
        ([0.5, 1.5], [], (), "holds 0.5: numbers to predict need another task"),
        ([0.5, None], [], (), "holds 0.5: numbers to predict need another task"),
        (["a", 1], [], (), "integers or all text; one of them is"),
    ],
)
def test_labels_out_of_range(train, test, classes, message):
    with pytest.raises(InputError, match=message):
        encode_labels(columns(train, test, classes))


def test_classification_needs_labels():
    with pytest.raises(InputError, match="needs a label column"):
        encode_labels(Columns(lambda rows: [], 3, 0))


@pytest.mark.parametrize("labels", [["a", None, "b", ""], [0, None, 1, None]])
def test_rows_without_a_label_have_no_class(labels):
    assert encode_labels(columns(labels))[0].tolist() == [0, -1, 1, -1]


def test_whole_numbers_beside_empty_cells_stay_whole():
    numbers, names = encode_labels(columns([2.0, None, 0.0], [2.0]))
    assert names == ("0", "2")
    assert numbers.tolist() == [1, -1, 0, 1]


def test_whole_numbers_that_floats_do_not_tell_apart_are_refused():
    large = [2.0**63, 2.0**63, 2.0**63 + 2048]
    told = "whole numbers such as 9223372036854775808 are too large to tell apart; write them as t"
    with pytest.raises(InputError, match=told):
        encode_clients(columns([0, 0], [0], clients=large))
    with pytest.raises(InputError, match=told):
        encode_labels(columns(large))
    train, test = (
        Table.from_dict({"text": ["a", "b"], "label": ["x", "y"], "id": ids})
        for ids in ([2**53 - 1, 2**53 + 1], [2.0**53, None])
    )
    with pytest.raises(InputError, match="'id' is int64 in the training split but float64 in the"):
        of_tables(train, test, DataConfig(client="id"))


@pytest.mark.parametrize("clients", [["zoe", "al", "zoe"], [70, 9, 70]])
def test_clients_are_numbered_and_keep_their_names(clients):
    groups, names = encode_clients(columns([0, 0], [0], clients=clients))
    assert groups.tolist() == [1, 0, 1]
    assert names == tuple(str(client) for client in (clients[1], clients[0]))
    assert groups.dtype == np.int64


@pytest.mark.parametrize("clients", [["zoe", 2.5], [1.5, 2.5], [1, "zoe"]])
def test_bad_clients(clients):
    with pytest.raises(
        InputError, match="client column must hold all integers or all text; it has"
    ):
        encode_clients(columns([0, 0], clients=clients))


@pytest.mark.parametrize("clients", [["zoe", None, "al"], [70.0, None, 9.0], ["zoe", " ", "al"]])
def test_an_empty_cell_names_no_client(clients):
    groups, names = encode_clients(columns([0, 0], [0], clients=clients))
    assert groups.tolist() == [1, -1, 0]
    assert names in (("al", "zoe"), ("9", "70"))
    with pytest.raises(InputError, match="no row has a client"):
        encode_clients(columns([0], [0], clients=[None, ""]))
    with pytest.raises(InputError, match="no test row has a client"):
        encode_clients(columns([0], [0, 0], clients=["al", None, " "]))


def test_columns_of_training_rows_have_no_test_rows():
    without = columns([0, 1], [2], clients=[4, 5, 6]).of_rows(np.arange(2))
    assert (without.labels, without.clients, without.num_test) == ([0, 1], [4, 5], 0)


TEXTS = ["a", "b", "c", "d", "e"]
CLIENTS = ["oslo", "haifa", None, "haifa", "oslo"]


def owned(clients):
    return Columns(lambda rows: [TEXTS[row] for row in rows], 3, 2, [0, 1, 2, 3, 4], (), clients)


def test_columns_keep_the_clients_rows_alone() -> None:
    own, omissions = columns_of_client(owned(CLIENTS), "haifa", "new.csv")
    assert own.read(np.arange(2)) == ["b", "d"]
    assert (own.num_train, own.num_test, own.labels, own.clients) == (1, 1, [1, 3], None)
    assert [one.text for one in omissions] == ["3 rows of other clients, left out"]
    assert columns_of_client(owned(None), "haifa", "new.csv")[0].num_train == 3
    numbers = [7.0, 8.0, None, 8.0, 7.0]
    assert columns_of_client(owned(numbers), "8", "new.csv")[0].labels == [1, 3]


def test_rows_of_other_clients_alone_are_refused() -> None:
    with pytest.raises(InputError) as caught:
        columns_of_client(owned(CLIENTS), "rome", "new.csv")
    assert str(caught.value) == (
        "new.csv has no rows of client 'rome', but of haifa (2), oslo (2); name one of these with "
        "--client, or leave out the column of clients"
    )
    tested = ["haifa", "haifa", "haifa", "oslo", "oslo"]
    with pytest.raises(InputError, match=r"no test rows of client 'haifa', but of oslo \(2\)"):
        columns_of_client(owned(tested), "haifa", "new.csv")
