"""The labels of clients: their most frequent classes, and what they have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .federation import Federation, Split
from .table import Indices

_SPLITS: tuple[Split, Split] = ("train", "test")
_MOST = 300  # clients that are compared with each other


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


def label_counts(federation: Federation) -> NDArray[np.integer[Any]]:
    """Count each client's examples by class, over its three splits: ``[K, classes]``."""
    dataset = federation.dataset
    assert dataset.class_numbers is not None
    return federation.partition.counts(dataset.class_numbers, dataset.num_classes, slice(None))


def label_overlap(counts: NDArray[np.integer[Any]]) -> float:
    """Return what two clients' label distributions have in common, the mean over all pairs, from
    their examples by class, ``[K, classes]``. Clients without an example are left out.

    It is ``sum_c min(p_c, q_c)``: 1 where the shares of all classes are the same, 0 where two
    clients share no class. In a federation of more than 300 clients, 300 evenly spread ones stand
    for all.

    >>> label_overlap(np.array([[3, 1], [1, 1], [0, 9]]))
    0.5
    """
    counts = counts[counts.sum(1) > 0]
    if len(counts) > _MOST:
        counts = counts[np.linspace(0, len(counts) - 1, _MOST).astype(int)]
    if len(counts) < 2:
        return 1.0
    shares = counts / counts.sum(1, keepdims=True)
    common = [np.minimum(shares[k], shares[k + 1 :]).sum(1) for k in range(len(shares) - 1)]
    return float(np.concatenate(common).mean())
