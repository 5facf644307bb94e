"""JSON objects, one in each line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from ..errors import InputError, brief


def objects_of(lines: Iterable[str], name: str) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file's lines; blank ones have none. ``name`` is the file's. Raises
    InputError where a line is no JSON object, or one that has a key twice.

    >>> [*objects_of(['{"a": 1}', "", '{"a": '], "b.jsonl")]
    Traceback (most recent call last):
    fedtailor.errors.InputError: can't read 'b.jsonl': line 3 is not a JSON object: '{"a":'; write \
one object in each line
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        twice: list[str] = []
        try:
            row = json.loads(line, object_pairs_hook=partial(_dict, twice))
        except (ValueError, RecursionError):
            row = None
        where = f"can't read {name!r}: line {number}"
        if not isinstance(row, dict):
            text = brief(line.strip())
            raise InputError(f"{where} is not a JSON object: {text}; write one object in each line")
        if twice:
            raise InputError(f"{where} has the key {brief(twice[0])} twice; leave one out")
        yield row


def _dict(twice: list[str], pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; its keys that come again go into ``twice``."""
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            twice.append(key)
        made[key] = value
    return made
