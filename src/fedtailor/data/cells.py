"""The cells of csv files: text, unless a whole column holds numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from ..errors import InputError, brief
from ..objectives import objective_of
from .columns import TEXT_NAMES, usual_column
from .config import DataConfig
from .text_files import separator_of

Kind = Literal["integer", "number", "text"]

_INTEGER = re.compile(r"\s*[+-]?[0-9]{1,18}\s*")
_EXACT = re.compile(r"0|-?[1-9][0-9]{0,17}")  # as Python writes it: "7", but not "007"
# with more digits a float would lose some: two long codes would be one class
_NUMBER = re.compile(r"\s*[+-]?([0-9]{1,15}(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?\s*")


# how pandas reads the cells of a csv file: as texts, and none of them but the empty one as a gap
AS_TEXT: dict[str, Any] = {"keep_default_na": False, "na_values": [""]}


def is_csv(path: str) -> bool:
    """Whether a file is read as a csv."""
    return Path(path).suffix == ".csv"


def separator(path: Path) -> str:
    """What separates the cells of a csv file in UTF-8."""
    with path.open(encoding="utf-8-sig") as file:
        return separator_of(file.readline())


def header(path: Path) -> list[str]:
    """The names of a csv file's columns; `pandas` numbers those without one.

    Raises:
        ValueError: it is no csv file; two columns have one name; its first row has more fields than
            the header.
    """
    import pandas

    options: dict[str, Any] = {"dtype": str, "keep_default_na": False, "sep": separator(path)}
    named = pandas.read_csv(path, nrows=1, header=None, **options).iloc[0].tolist()
    check_column_names(named)
    head = pandas.read_csv(path, nrows=1, **options)
    if not isinstance(head.index, pandas.RangeIndex):
        raise ValueError("row 1 has more fields than the header")
    return [str(name) for name in head.columns]


def check_column_names(names: Sequence[str]) -> None:
    """Raise ValueError if two columns have one name; empty ones don't count.

    >>> check_column_names(["text", "label", "", "", "label"])
    Traceback (most recent call last):
    ValueError: two columns are named 'label'; rename one
    """
    seen: set[str] = set()
    for name in names:
        if name.strip() and name in seen:
            raise ValueError(f"two columns are named {brief(name)}; rename one")
        seen.add(name)


def kind_of(cells: Iterable[str | None], *, exact: bool = False) -> Kind:
    """What a column holds; empty cells don't count.

    Args:
        cells: texts; None or blank where a cell is empty.
        exact: whole numbers are those alone that keep their spelling as numbers.

    >>> kind_of(["7", None, "007"]), kind_of(["7", "007"], exact=True), kind_of(["1.5", "2"])
    ('integer', 'text', 'number')
    >>> kind_of(["1", "NA"])
    'text'
    """
    present = [cell for cell in cells if cell is not None and cell.strip()]
    if present and all(map((_EXACT if exact else _INTEGER).fullmatch, present)):
        return "integer"
    if exact and all(map(_INTEGER.fullmatch, present)):
        return "text" if present else "number"
    return "number" if all(map(_NUMBER.fullmatch, present)) else "text"


def values(cells: Sequence[str | None], kind: Kind) -> list[Any]:
    """The cells of a column of that kind; None where a cell is empty."""
    make = {"integer": int, "number": float, "text": str}[kind]
    return [make(cell) if cell is not None and cell.strip() else None for cell in cells]


def with_numbers(tables: Sequence[Any], config: DataConfig) -> list[Any]:
    """The csv tables of one source, which hold texts alone, with numbers as labels and clients.

    Labels are class numbers where all of them are whole numbers, unless ``config.classes`` names
    them all. Clients are numbers where that loses nothing of their names.

    Args:
        tables: one or two ``datasets.Dataset``.
        config: names the columns.

    Raises:
        InputError: all texts are numbers.
    """
    names = tables[0].column_names
    objective = objective_of(config.task)
    text = config.text or usual_column(TEXT_NAMES, names)
    label = config.label or usual_column(objective.target_names, names)
    if text is not None and text in names and kind_of(_cells(tables[:1], text)) != "text":
        raise InputError(f"column {text!r} holds numbers or nothing, not text or images")
    kinds: dict[str, Kind] = {}
    if label is not None and objective.reads_targets:
        cells = _cells(tables, label)
        named = all(not cell or not cell.strip() or cell in config.classes for cell in cells)
        kinds[label] = "text" if named else kind_of(cells)
    if config.client is not None:
        kind = kind_of(_cells(tables, config.client), exact=True)
        kinds[config.client] = "integer" if kind == "integer" else "text"
    return [_converted(table, kinds) for table in tables]


def _cells(tables: Sequence[Any], column: str) -> list[str | None]:
    return [cell for table in tables if column in table.column_names for cell in table[column][:]]


def _converted(table: Any, kinds: dict[str, Kind]) -> Any:
    from datasets import Value

    for name, kind in kinds.items():
        if kind != "text" and name in table.column_names and len(table.column_names) > 1:
            dtype = "int64" if kind == "integer" else "float64"
            cells = values(table[name][:], kind)
            table = table.remove_columns(name).add_column(name, cells, feature=Value(dtype))
    return table
