import numpy as np
import pytest

from fedtailor.data import Dataset, SplitConfig, partition
from fedtailor.data.altered import rotate_pictures, shuffle_labels
from fedtailor.data.table import Images
from fedtailor.errors import InputError

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("rotations", "quarters"), [(4, [0, 1, 2, 3, 0]), (2, [0, 2, 0, 2, 0])])
def test_all_pictures_of_a_client_are_turned_by_its_angle(digits, rotations, quarters):
    parts = partition(digits, SplitConfig(clients=5, validation=0.2), seed=3)
    rotated = rotate_pictures(digits, parts, rotations)
    for client, turns in enumerate(quarters):
        for split in (parts.train, parts.validation, parts.test):
            rows = split[client]
            upright = np.rot90(rotated.inputs.values[rows], -turns, axes=(2, 3))
            assert np.array_equal(upright, digits.inputs.values[rows])
    assert np.array_equal(rotated.labels, digits.labels)
    assert rotated.digest != digits.digest
    assert rotate_pictures(digits, parts, 1) is digits


def test_a_picture_that_is_not_square_is_turned_by_180_degrees_alone():
    values = np.arange(24, dtype=np.uint8).reshape(4, 1, 2, 3)
    dataset = Dataset(Images(values), 4, "classification", labels=np.zeros(4, int), classes=["a"])
    parts = partition(dataset, SplitConfig(clients=2, validation=0, test=0), seed=0)
    with pytest.raises(InputError, match=r"^split.rotations is 4, .* 2 x 3 .* allowed: 1 or 2"):
        rotate_pictures(dataset, parts, 4)
    (row,) = parts.train[1][:1]
    turned = rotate_pictures(dataset, parts, 2).inputs.values[row, 0]
    assert np.array_equal(turned, values[row, 0, ::-1, ::-1])


def test_texts_have_no_angle(chitchat):
    parts = partition(chitchat, SplitConfig(clients=3), seed=0)
    with pytest.raises(InputError, match=r"^split.rotations is 2, but the data are texts"):
        rotate_pictures(chitchat, parts, 2)


def test_a_share_of_the_clients_has_its_training_labels_shuffled(digits):
    parts = partition(digits, SplitConfig(clients=10, validation=0.2), seed=3)
    shuffled = shuffle_labels(digits, parts, 0.2, seed=3)
    changed = np.flatnonzero(shuffled.labels != digits.labels)
    hit = [client for client in range(10) if np.isin(parts.train[client], changed).any()]
    assert len(hit) == 2
    assert np.isin(changed, np.concatenate([parts.train[client] for client in hit])).all()
    for client in hit:
        rows = parts.train[client]
        assert np.array_equal(np.sort(shuffled.labels[rows]), np.sort(digits.labels[rows]))
        assert np.isin(rows, changed).mean() > 0.7  # of ten classes a tenth stays by chance
    again = shuffle_labels(digits, parts, 0.2, seed=3)
    assert np.array_equal(again.labels, shuffled.labels)
    assert shuffle_labels(digits, parts, 0.0, seed=3) is digits


def test_data_without_labels_have_none_to_shuffle(chitchat):
    parts = partition(chitchat, SplitConfig(clients=3), seed=0)
    with pytest.raises(InputError, match=r"^split.shuffled is 0.5, but the data have no labels"):
        shuffle_labels(chitchat, parts, 0.5, seed=0)
