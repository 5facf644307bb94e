"""What holds for every kind of task."""

from __future__ import annotations

import pickle

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
