"""The cells of a column: blanks, empty cells, whole numbers that a reader made floats."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..errors import InputError, brief

_INEXACT = 2.0**53  # from here on a float stands for several whole numbers
_DECIMAL_COMMA = re.compile(r"[+-]?([0-9]{1,3}([.\s][0-9]{3})+|[0-9]+),[0-9]+")  # 1.234,5
_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]+)?")  # 1,234.5
_YES, _NO = {"1", "1.0", "true", "yes", "y"}, {"0", "0.0", "false", "no", "n"}
_GROUPED = re.compile(r"[+-]?[0-9]{1,3}([.\s][0-9]{3})+(,[0-9]+)?")


@dataclass(frozen=True)
class Cells:
    """A column of targets as a source has it: ``values`` of Python's types, one a row, the training
    rows first. ``classes`` are the names of integer values, if the source names them. ``place``
    says in messages where the column stands, and ``numbers`` which of the source's rows each is,
    from 1 on in either split; None: these are all."""

    values: Sequence[Any]
    num_train: int
    classes: tuple[str, ...] = ()
    place: str = "the labels"
    numbers: Sequence[int] | None = None

    def row_number(self, row: int) -> int:
        """Return which of its split's rows in the source one is, from 1 on."""
        if self.numbers is not None:
            return int(self.numbers[row])
        return 1 + (row if row < self.num_train else row - self.num_train)

    def refused(self, row: int, task: str, needed: str) -> InputError:
        """Return the error at a cell that holds something else than what the ``task`` needs."""
        return InputError(
            f"{self.place} holds {brief(self.values[row], 60)} in row {self.row_number(row)}: the "
            f"task {task!r} needs {needed}"
        )

    def check_known(self, known: Any, what: str, hint: str = "") -> None:
        """Raise InputError where no row of a split has ``what`` is needed, as ``known``, bool
        ``[N]``, tells. The message ends with a ``hint``."""
        splits = {"training": known[: self.num_train], "test": known[self.num_train :]}
        for split, some in splits.items():
            if len(some) and not any(some):
                raise InputError(
                    f"{self.place}: no row of the {split} split has {what}; name another column"
                    f"{hint}"
                )


def usual_column(usual: Sequence[str], names: Collection[str]) -> str | None:
    """Return the first of ``usual`` that is one of the columns ``names``.

    >>> usual_column(["text", "content"], ["label", "content"])
    'content'
    """
    return next((name for name in usual if name in names), None)


def rows_of(columns: Sequence[Sequence[Any] | None]) -> Iterator[tuple[Any, ...]]:
    """The cells of each row of some columns; of one that is absent they are None."""
    rows = max(len(column) for column in columns if column is not None)
    return zip(*([None] * rows if one is None else one for one in columns), strict=True)


def is_blank(value: Any) -> bool:
    """Whether a cell is empty; NaN is, as pandas reads it."""
    if isinstance(value, float):
        return value != value
    return value is None or (isinstance(value, str) and not value.strip())


def parsed(cell: Any, begins: str = "[") -> Any:
    """The list that a text is as JSON or Python writes it, or what else ``begins`` so; another cell
    as it is."""
    if isinstance(cell, str) and cell.lstrip().startswith(begins):
        for read in (json.loads, ast.literal_eval):
            with suppress(ValueError, SyntaxError, RecursionError):
                found = read(cell.strip())
                return found if isinstance(found, list | dict) else cell
    return cell


def written(content: Any) -> str:
    """A value as JSON; half a character becomes a question mark."""
    return json.dumps(content, ensure_ascii=False).encode(errors="replace").decode()


def flag(value: Any) -> bool | None:
    """What a cell of 0 or 1, or no or yes, says; None for another cell.

    >>> flag(1), flag("No"), flag(2)
    (True, False, None)
    """
    said = str(value).strip().lower()
    return True if said in _YES else False if said in _NO else None


def is_whole(value: Any) -> bool:
    """Whether a float stands for one whole number.

    >>> is_whole(1.0), is_whole(1.5), is_whole(2.0**53)
    (True, False, False)
    """
    return isinstance(value, float) and value.is_integer() and abs(value) < _INEXACT


def whole(values: Sequence[Any] | None) -> Sequence[Any] | None:
    """Undo what readers make of whole numbers beside empty cells, or beside 1.0: floats. Raises
    InputError where these are so large that they may stand for several numbers."""
    if values is None or not any(isinstance(value, float) for value in values):
        return values
    cells = [None if value != value else value for value in values]
    if not all(value.is_integer() for value in cells if isinstance(value, float)):
        return values
    if large := [x for x in cells if isinstance(x, float) and not is_whole(x)]:
        raise InputError(
            f"whole numbers such as {large[0]:.0f} are too large to tell apart; write them as texts"
        )
    return [int(value) if isinstance(value, float) else value for value in cells]


def with_points(values: Sequence[Any]) -> Sequence[Any]:
    """Write numbers that are texts with commas as Python does: commas are decimal points, or stand
    between thousands, as all of these cells say; as they are where that is not known.

    >>> with_points(["1.234,50", "7", None]), with_points(["1,234.50"]), with_points(["1,234"])
    (['1234.50', '7', None], ['1234.50'], ['1,234'])
    """
    with_comma = {x.strip() for x in values if isinstance(x, str) and "," in x}
    is_decimal, is_thousands = (
        all(map(form.fullmatch, with_comma)) for form in (_DECIMAL_COMMA, _THOUSANDS)
    )
    if is_decimal == is_thousands:  # without commas, too
        return values

    def plain(value: Any) -> Any:
        if not isinstance(value, str):
            return value
        text = value.strip()
        if is_decimal and _GROUPED.fullmatch(text):
            text = re.sub(r"[.\s]", "", text)
        return text.replace(",", "." if is_decimal else "")

    return [plain(value) for value in values]


def trimmed(value: Any) -> Any:
    """What a cell names, without blanks around it; None for a cell of blanks alone.

    >>> trimmed(" berlin "), trimmed("  "), trimmed(7)
    ('berlin', None, 7)
    """
    return (value.strip() or (None if value else "")) if isinstance(value, str) else value
