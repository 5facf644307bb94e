"""Clients with wrong labels: those of their training rows are shuffled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .. import random
from ..errors import InputError
from .table import Dataset, Partition


def shuffle_labels(dataset: Dataset, parts: Partition, share: float, seed: int) -> Dataset:
    """Shuffle the labels of some clients' training rows, each client's among themselves.

    A client keeps its number of rows of each class; validation and test rows keep their labels.

    Args:
        dataset: N rows.
        parts: the rows of K clients.
        share: so many of the K clients, rounded, drawn by the seed.
        seed: the random seed.

    Raises:
        InputError: the data have no labels.
    """
    if share == 0:
        return dataset
    if dataset.class_numbers is None:
        raise InputError(f"split.shuffled is {share}, but the data have no labels; allowed: 0")
    labels, count = np.array(dataset.class_numbers), len(parts.train)
    order = random.generator(seed, "partition", "shuffled").permutation(count)
    for client in order[: round(share * count)].tolist():
        rows = parts.train[client]
        rng = random.generator(seed, "partition", "shuffled", client)
        labels[rows] = labels[rng.permutation(rows)]
    return replace(dataset, labels=labels)
