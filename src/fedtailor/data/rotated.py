"""Clients that differ in their inputs: the pictures of some are turned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from .table import Dataset, Images, Partition


def rotate_pictures(dataset: Dataset, parts: Partition, rotations: int) -> Dataset:
    """Turn the pictures of client k by k mod ``rotations`` times 360 / ``rotations`` degrees.

    All rows of a client are turned, counter-clockwise: those for training, validation and test.

    Args:
        dataset: N pictures.
        parts: the rows of K clients.
        rotations: 1, 2 (0 and 180 degrees) or 4 (0, 90, 180 and 270 degrees).

    Raises:
        InputError: the inputs are texts, or pictures that 90 degrees would give another shape.
    """
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
