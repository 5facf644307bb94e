"""Dataclasses from plain values, such as a file's, checked against the types of their fields."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from ..errors import InputError, brief, unknown
from ..store.checked import hints_of, what_is_wrong

T = TypeVar("T")


def build(defaults: T, changes: Mapping[str, Any], where: str) -> T:
    """``defaults``, a dataclass, with the fields in ``changes`` replaced, nested ones field by
    field, and checked against their types."""
    kind = type(defaults)
    fields = {f.name: f for f in dataclasses.fields(defaults)}  # type: ignore[arg-type]
    values = {name: getattr(defaults, name) for name in fields}
    for key, value in changes.items():
        if key not in fields:
            raise unknown("key", key, fields, where=where, kind="fields")
        current = values[key]
        if dataclasses.is_dataclass(current) and isinstance(value, Mapping):
            values[key] = build(current, value, f"{where}.{key}".lstrip("."))
        else:
            values[key] = value
    checked = {name: _checked(kind, name, values[name], where) for name in changes}
    return dataclasses.replace(defaults, **checked)  # type: ignore[type-var]


def _checked(kind: type, name: str, value: Any, where: str) -> Any:
    hint, key = hints_of(kind)[name], f"{where}.{name}".lstrip(".")
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, hint):  # type: ignore[arg-type]
            raise InputError(f"{key} must be a table, got {brief(value)}")
        return value
    entry, *_ = typing.get_args(hint) or (None,)
    is_list = typing.get_origin(hint) is tuple
    if is_list and isinstance(entry, type) and dataclasses.is_dataclass(entry):
        return _entries(entry, value, key)
    if value == "none" and type(None) in typing.get_args(hint):  # TOML has no null
        return None
    for one in value if isinstance(value, list | tuple) else (value,):
        if isinstance(one, bool) and hint is not bool:
            raise InputError(f"{key} = {str(one).lower()}: it must not be true or false")
        if isinstance(one, float) and not math.isfinite(one):
            raise InputError(f"{key} must be finite, got {one}")
    try:
        checked = _adapter(kind, name).validate_python(value)
    except ValidationError as error:
        found = what_is_wrong(error)
        reason = _REASONS.get(found["type"], found["msg"])
        if found["type"] == "tuple_type":
            is_word = isinstance(value, str) and value.isidentifier()
            reason += f'["{value}"]' if is_word else "[0, 1]"
        raise InputError(f"{key} = {brief(value)}: {reason[0].lower()}{reason[1:]}") from None
    for one in checked if isinstance(checked, tuple) else (checked,):
        if isinstance(one, str) and (wrong := _unfit(one)):
            raise InputError(f"{key} = {brief(one)}: it must not hold {wrong}")
    return checked


def _unfit(text: str) -> str:
    """What no file's name can hold of a text; empty if nothing."""
    try:
        return "a NUL character" if b"\0" in os.fsencode(text) else ""
    except UnicodeEncodeError:
        return "half a surrogate pair"


_REASONS = {  # in other words than pydantic's
    "tuple_type": "it must be a list, such as ",
    "too_short": "it must have at least one entry",
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "it must be a whole number"),
    **dict.fromkeys(("float_parsing", "float_type"), "it must be a number"),
}


def as_written(value: Any) -> str:
    """Return a field's value as an experiment file has it.

    >>> as_written(True), as_written((1, 2)), as_written("sgd"), as_written(None)
    ('true', '[1, 2]', "'sgd'", "'none'")
    """
    if isinstance(value, tuple):
        return f"[{', '.join(map(as_written, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    return repr("none" if value is None else value)


def _entries(kind: type, values: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(values, list | tuple):
        raise InputError(f"{where} must be a list of tables, got {brief(values)}")
    entries = []
    for at, value in enumerate(values):
        if not isinstance(value, kind):
            if not isinstance(value, Mapping):
                raise InputError(f"{where}[{at}] must be a table, got {brief(value)}")
            value = build(kind(), value, f"{where}[{at}]")
        entries.append(value)
    return tuple(entries)


@functools.cache
def _adapter(kind: type, name: str) -> TypeAdapter[Any]:
    """What checks a field's value, which takes pydantic long to build."""
    return TypeAdapter(hints_of(kind)[name])
