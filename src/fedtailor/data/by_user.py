"""JSON by user, as LEAF writes it, and SQuAD's: a file or a folder as the rows of one table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, brief
from .json_lines import objects_of
from .squad import answers_column, is_squad, squad_rows

_CLIENT = "user"


def files_of(path: Path) -> list[Path]:
    """The JSON files of a path: itself, or those of a folder, in the order of their names."""
    if path.is_dir():
        return sorted(path.glob("*.json"))
    return [path] if path.suffix == ".json" and path.is_file() else []


def rows_by_user(files: Sequence[Path], name: str) -> Any:
    """Read JSON as a ``datasets.Dataset``.

    Allowed are LEAF's ``{"users": [...], "user_data": {user: {"x": [...], "y": [...]}}}``, with
    ``x`` as texts or as flat pictures; SQuAD's, as `squad_rows` says; ``{user: [rows]}``; a list of
    rows; and one row a line. The users are in the column ``user``; LEAF's ``x`` is ``text`` or
    ``image``, its ``y`` ``label``. Raises InputError where a file has none of these forms; an ``x``
    is neither text nor picture."""
    from datasets import Dataset

    rows = _spread([row for file in files for row in _rows(file, name)])
    columns = list(dict.fromkeys(column for row in rows for column in row))
    try:
        cells = {c: [row.get(c) for row in rows] for c in columns}
        return Dataset.from_dict(cells | answers_column(cells.get("answers")))
    except UnicodeEncodeError as error:
        half = f"a text holds half of a character, {error.object[error.start]!a}"
        raise InputError(f"can't read {name!r}: {half}; write it whole, or leave it out") from None
    except (ValueError, TypeError, OverflowError) as error:  # pyarrow's errors are among them
        words = f"a column has values of two types: {' '.join(str(error).split())}"
        raise InputError(f"can't read {name!r}: {words}") from None


def _spread(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with LEAF's lists of texts, which are tuples, as columns ``x0``, ``x1`` and so on if
    all have as many, else as the column ``tokens``."""
    is_several = [isinstance(row.get("x"), tuple) for row in rows]
    sizes = {len(row["x"]) for row, several in zip(rows, is_several, strict=True) if several}
    for number in np.flatnonzero(is_several):
        texts, others = rows[number]["x"], {k: v for k, v in rows[number].items() if k != "x"}
        columns = {f"x{n}": text for n, text in enumerate(texts)}
        rows[number] = (columns if len(sizes) == 1 else {"tokens": texts}) | others
    return rows


def _rows(file: Path, name: str) -> Iterator[dict[str, Any]]:
    content = _parsed(file)
    if isinstance(content, dict) and isinstance(content.get("user_data"), dict):
        for user, data in content["user_data"].items():
            yield from _leaf_rows(user, data, file)
    elif is_squad(content):
        yield from squad_rows(content, file)
    elif isinstance(content, dict) and all(isinstance(rows, list) for rows in content.values()):
        for user, rows in content.items():
            for number, row in enumerate(rows):
                row = {"text": row} if isinstance(row, str) else row
                if not isinstance(row, dict) or row.get(_CLIENT, user) != user:
                    raise _wrong(file, user, number, "is no row of this user", row)
                yield {**row, _CLIENT: user}
    elif isinstance(content, list) and all(isinstance(row, dict) for row in content):
        yield from content
    else:
        raise InputError(
            f'can\'t read {str(file)!r}: allowed are LEAF\'s {{"users": ..., "user_data": ...}}, '
            'SQuAD\'s {"data": [{"paragraphs": ...}]}, {user: [rows]}, a list of rows, or one row '
            "a line"
        )


def _parsed(file: Path) -> Any:
    try:
        text = file.read_text(encoding="utf-8-sig")
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            if not error.msg.startswith("Extra data"):
                raise
            return [*objects_of(text.split("\n"), str(file))]
    except UnicodeDecodeError:
        raise InputError(f"can't read {str(file)!r}: it is not UTF-8; save it as UTF-8") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"can't read {str(file)!r} as JSON: {error}") from None


def _leaf_rows(user: str, data: Any, file: Path) -> Iterator[dict[str, Any]]:
    inputs, labels = (data.get(key) if isinstance(data, dict) else None for key in ("x", "y"))
    if not isinstance(inputs, list) or not isinstance(labels, list) or len(inputs) != len(labels):
        raise InputError(f"{file}: user {brief(user)} needs lists x and y of one length")
    for number, (x, y) in enumerate(zip(inputs, labels, strict=True)):
        row = _input(x, user, number, file)
        if "x" in row and isinstance(y, list) and len(y) == len(x):
            yield {"tokens": x, "tags": y, _CLIENT: user}
        else:
            yield {**row, "label": y, _CLIENT: user}


def _input(x: Any, user: str, number: int, file: Path) -> dict[str, Any]:
    """LEAF's ``x``: a text, several texts, or a square picture's pixels."""
    from PIL import Image

    if isinstance(x, str):
        return {"text": x}
    if isinstance(x, list) and x and all(isinstance(value, str) for value in x):
        return {"x": tuple(x)}
    if not isinstance(x, list) or not x or not all(type(value) in (int, float) for value in x):
        raise _wrong(file, user, number, "is neither a text nor a flat list of pixels", x)
    side, channels = next(
        ((isqrt(len(x) // c), c) for c in (1, 3) if c * isqrt(len(x) // c) ** 2 == len(x)), (0, 0)
    )
    if side < 2:
        raise _wrong(file, user, number, f"has {len(x)} values, which are no square picture", x)
    values = np.array(x, np.float64)
    if not (values.min() >= 0 and values.max() <= 1):
        raise _wrong(file, user, number, "has pixels out of 0 to 1", x)
    shape = (side, side) if channels == 1 else (side, side, 3)
    return {"image": Image.fromarray(np.rint(values * 255).astype(np.uint8).reshape(shape))}


def _wrong(file: Path, user: str, number: int, what: str, value: Any) -> InputError:
    return InputError(f"{file}: row {number} of user {brief(user)} {what}: {brief(value, 60)}")
