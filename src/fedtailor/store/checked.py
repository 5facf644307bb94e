"""The JSON of a run directory, checked against the types of the dataclasses that hold it."""

from __future__ import annotations

import json
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import numpy as np
from annotated_types import Ge, Le, Lt
from pydantic import ConfigDict, TypeAdapter, ValidationError

from ..errors import InputError, brief
from .format import missing, unseal_json

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from pydantic_core import ErrorDetails

    Record = TypeVar("Record", bound=DataclassInstance)

MOST = 10**15  # of any count; sums over all clients and rounds stay below 2^63
Count = Annotated[int, Ge(0), Le(MOST)]
Seed = Annotated[int, Ge(0), Lt(2**63)]
Amount = Annotated[float, Ge(0), Le(1e15)]  # of seconds, megabytes or a factor
Results = typing.Sequence[float | None]  # of clients; None where there is nothing to measure
_LARGEST = 1e60  # of a loss or a metric; squares and sums stay finite


def load_json(content: bytes, source: str) -> Any:
    """Return the values of a JSON text; InputError where it is not JSON."""
    try:
        return json.loads(content.decode())
    except ValueError as error:
        raise InputError(f"{source} is not valid JSON: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, without its checksum, which is checked."""
    try:
        values = load_json(path.read_bytes(), str(path))
    except FileNotFoundError:
        raise missing(path) from None
    _check_object(values, str(path))
    return unseal_json(values, path)


def _check_object(values: Any, source: str) -> None:
    if not isinstance(values, Mapping):
        raise InputError(f"{source} must hold an object, not {type(values).__name__}")


def read_record(kind: type[Record], path: Path) -> Record:
    """Return what a JSON file says, as `record` does."""
    return record(kind, read_json(path), str(path))


def record(kind: type[Record], values: Any, source: str) -> Record:
    """Return a dataclass from plain values of the types of its fields; other keys are left out.
    Raises InputError where a field is missing, or a value is of another type or out of range."""
    _check_object(values, source)
    needed = [
        field.name
        for field in fields(kind)
        if field.default is MISSING and field.default_factory is MISSING
    ]
    missing = [name for name in needed if name not in values]
    if missing:
        raise InputError(f"{source} lacks {', '.join(missing)}; needed: {', '.join(needed)}")
    hints = hints_of(kind)
    return kind(**checked(values, {one.name: hints[one.name] for one in fields(kind)}, source))


def checked(values: Mapping[str, Any], hints: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return those of the values by name that have one of these types; InputError as `record`."""
    return {n: _checked(hint, n, values[n], source) for n, hint in hints.items() if n in values}


def records(kind: type[Record], values: Any, source: str) -> dict[str, Record]:
    """Return several by name, each as `record` does."""
    _check_object(values, source)
    return {name: record(kind, one, f"{source}.{name}") for name, one in values.items()}


def check_results(values: Results, clients: int, source: str) -> None:
    """Check that there is one result for each of the clients, and none beyond all measure."""
    if len(values) != clients:
        raise InputError(f"{source} has {len(values)} values for {clients} clients")
    numbers = np.array([0.0 if value is None else value for value in values])
    huge = np.isfinite(numbers) & (np.abs(numbers) > _LARGEST)
    if huge.any():
        raise InputError(f"{source} has {numbers[huge][0]}; at most {_LARGEST:g} is read")


def _checked(hint: Any, name: str, value: Any, source: str) -> Any:
    if isinstance(value, np.ndarray):  # of a safetensors file, which has types of its own
        return value
    try:
        return _adapter(hint).validate_python(value)
    except ValidationError as error:
        first = what_is_wrong(error)
        place = "".join(f"[{at}]" for at in first["loc"] if isinstance(at, int))
        reason = f"{first['msg'][0].lower()}{first['msg'][1:]}"
        raise InputError(f"{source}: {name}{place} = {brief(first['input'])}: {reason}") from None


def what_is_wrong(error: ValidationError) -> ErrorDetails:
    """The part of an error that says most: of several kinds that a value may be, it is the one
    that fits it best."""
    return max(error.errors(), key=lambda found: len(found["loc"]))


@cache
def hints_of(kind: type) -> dict[str, Any]:
    """The types of a dataclass's fields, which take Python long to work out."""
    return typing.get_type_hints(kind, include_extras=True)


@cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint, config=ConfigDict(strict=True, arbitrary_types_allowed=True))
