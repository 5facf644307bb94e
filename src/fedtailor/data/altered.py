"""Clients that differ further: the pictures of some are turned, the labels of some are wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import random
from ..errors import InputError
from .table import Dataset, Images, Partition


def rotate_pictures(dataset: Dataset, parts: Partition, rotations: int) -> Dataset:
    """Turn the pictures of client k by k mod ``rotations`` times 360 / ``rotations`` degrees.

    All rows of a client are turned, counter-clockwise: those for training, validation and test.
    ``rotations`` are 1, 2 (0 and 180 degrees) or 4 (0, 90, 180 and 270 degrees). Raises InputError
    where the inputs are texts, or pictures that 90 degrees would give another shape."""
    if rotations == 1:
        return dataset
    if not isinstance(dataset.inputs, Images):
        raise InputError(f"split.rotations is {rotations}, but the data are texts; allowed: 1")
    values: NDArray[Any] = np.array(dataset.inputs.values)
    height, width = values.shape[-2:]
    if rotations == 4 and height != width:
        raise InputError(
            f"split.rotations is 4, but pictures of {height} x {width} are not square; allowed: "
            "1 or 2"
        )
    for client in range(len(parts.train)):
        quarters = client % rotations * (4 // rotations)
        if quarters:
            for split in (parts.train, parts.validation, parts.test):
                rows = split[client]
                values[rows] = np.rot90(values[rows], quarters, axes=(-2, -1))
    return replace(dataset, inputs=Images(values), digest="")


def shuffle_labels(dataset: Dataset, parts: Partition, share: float, seed: int) -> Dataset:
    """Shuffle the labels of a ``share`` of the clients' training rows, each client's among
    themselves. A client keeps its number of rows of each class; validation and test rows keep their
    labels. Raises InputError where the data have no labels."""
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
