import numpy as np
import pytest

from fedtailor.data import SplitConfig, partition
from fedtailor.data.shuffled import shuffle_labels
from fedtailor.errors import InputError


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
