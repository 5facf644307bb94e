"""What holds for every kind of task."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from fedtailor.errors import InputError
from fedtailor.objectives import OBJECTIVES, objective_of
from fedtailor.objectives.objective import Objective


@pytest.mark.parametrize("one", OBJECTIVES.values())
def test_a_copy_is_the_same_kind(one: Objective) -> None:
    copy = pickle.loads(pickle.dumps(one))
    assert copy == one == objective_of(one.name)
    assert hash(copy) == hash(one)
    assert [other for other in OBJECTIVES.values() if other == copy] == [one]


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(InputError, match="unknown task 'causal'; did you mean 'causal-lm'"):
        objective_of("causal")


_P = np.array([[0.9, 0.1], [0.2, 0.8], [0.4, 0.6]])
ALIKE: dict[str, tuple[Any, Any, Any]] = {  # targets, others, and predictions of them
    "classification": (np.array([1, 1, 1]), np.array([0, 1, 1]), _P),
    "multi-label": (np.zeros((3, 2), int), np.eye(3, 2, dtype=int), np.c_[_P, [0.5] * 3]),
    "regression": (np.full(3, 2.0), np.array([1.0, 2.0, 3.0]), _P[:, :1]),
    "token-classification": ([np.array([1, -100])], [np.array([0, 1])], [["B-X", "O"]]),
}


@pytest.mark.parametrize("kind", ALIKE)
def test_metrics_are_told_to_be_undefined_where_they_are(kind: str) -> None:
    objective, classes = OBJECTIVES[kind], ["B-X", "O"]
    alike, others, predictions = ALIKE[kind]
    for targets in (alike, others):
        told = objective.undefined(targets, classes)
        named: Any = targets
        if isinstance(targets, list):
            named = [[classes[tag] for tag in one if tag >= 0] for one in targets]
        values = {name: one(named, predictions) for name, one in objective.metrics.items()}
        assert {name for name, value in values.items() if np.isnan(value)} == {*told}
    assert objective.undefined(alike, classes)
    assert not objective.undefined(others, classes)
