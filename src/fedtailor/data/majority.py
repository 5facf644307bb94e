"""The simplest model of a client: it predicts the most frequent class of the training examples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .federation import Federation, Split
from .table import Indices

_SPLITS: tuple[Split, Split] = ("train", "test")


def majority_class(federation: Federation, clients: Sequence[int]) -> tuple[Indices, Indices]:
    """Return the most frequent class of some clients' own training examples (of equals the first),
    and how many of their test examples have it, each ``[K]``; -1 for all other clients."""
    dataset = federation.dataset
    assert dataset.class_numbers is not None
    majority = np.full(federation.num_clients, -1)
    correct = np.full(federation.num_clients, -1)
    for client in clients:
        train, test = (dataset.class_numbers[federation.rows(client, at)] for at in _SPLITS)
        majority[client] = np.bincount(train).argmax()
        correct[client] = np.count_nonzero(test == majority[client])
    return majority, correct
