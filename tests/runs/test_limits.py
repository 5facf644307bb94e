"""Every number that a file may set has an upper limit, those of a deployment, too."""

import dataclasses
import typing
from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from annotated_types import Le, Lt

from fedtailor.deploy.folder import Deployment
from fedtailor.methods import METHODS
from fedtailor.optim import Optimiser
from fedtailor.runs.experiment import Experiment
from fedtailor.runs.tune import Range, TuneConfig
from fedtailor.uploads.rules import Robust


def _numbers_without_limit(hint: Any, limits: tuple[Any, ...] = ()) -> bool:
    """Whether numbers of a type, or of a type in it, may be as large as one likes."""
    if typing.get_origin(hint) is Annotated:
        inner, *limits = typing.get_args(hint)
        return _numbers_without_limit(inner, tuple(limits))
    if hint in (int, float):
        return not any(isinstance(limit, Le | Lt) for limit in limits)
    return any(_numbers_without_limit(inner) for inner in typing.get_args(hint))


def _dataclasses(kind: Any) -> Iterator[type]:
    """A dataclass and those in its fields."""
    if dataclasses.is_dataclass(kind):
        yield kind
        for hint in typing.get_type_hints(kind).values():
            for inner in (hint, *typing.get_args(hint)):
                yield from _dataclasses(inner)


SETTINGS = {*METHODS.values(), *_dataclasses(Experiment), Optimiser, Robust, TuneConfig, Range}
SETTINGS |= set(_dataclasses(Deployment))


@pytest.mark.parametrize("kind", sorted(SETTINGS, key=lambda kind: kind.__name__))
def test_every_number_has_an_upper_limit(kind: type) -> None:
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = [field.name for field in dataclasses.fields(kind)]
    assert [name for name in fields if _numbers_without_limit(hints[name])] == []
