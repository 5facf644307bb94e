"""The classes of a column of labels."""

from __future__ import annotations

from fedtailor.data.columns import Columns, targets_of
from fedtailor.data.table import Indices
from fedtailor.objectives import DEFAULT


def encode_labels(
    columns: Columns, classes: tuple[str, ...] = ()
) -> tuple[Indices, tuple[str, ...]]:
    targets = targets_of(columns, DEFAULT, classes)
    assert targets is not None
    assert (targets.is_known == (targets.values >= 0)).all()
    return targets.values, targets.classes
