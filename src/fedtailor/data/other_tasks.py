"""Kinds of task that do not exist yet, told by the columns of a table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import InputError, brief
from ..objectives.cells import is_blank
from ..objectives.classification import NOT_YET

_PAIRS = (
    "premise hypothesis", "question sentence", "question context", "question passage",
    "question answer", "query document", "query passage", "query answer", "claim evidence",
    "context response", "prompt completion", "prompt response", "instruction output",
    "instruction response", "anchor positive", "source target", "chosen rejected", "text text_pair",
)  # fmt: skip
_NUMBERED = re.compile(
    r"(text|sentence|sent|s|question|q|query|document|doc|passage|premise|title|abstract|utterance|"
    r"claim|code|review|comment|paragraph)[ _-]?(1|2|a|b)"
)
_FLAGS = ({"0", "1"}, {"0.0", "1.0"}, {"true", "false"}, {"yes", "no"}, {"y", "n"})
_YES = {"1", "1.0", "true", "yes", "y"}


def pair_of(texts: Sequence[str], usual: str | None) -> tuple[str, ...]:
    """Return which two of the columns of texts are called like a pair; none where there is a column
    with a ``usual`` name for a text, and it is not one of them.

    >>> pair_of(["hypothesis", "premise"], None)
    ('premise', 'hypothesis')
    """
    by_name = {name.lower().replace("-", "_"): name for name in texts}
    pairs = [pair.split() for pair in _PAIRS]
    found = [(by_name[a], by_name[b]) for a, b in pairs if a in by_name and b in by_name]
    stems: dict[str, list[str]] = {}
    for lower, name in by_name.items():
        if numbered := _NUMBERED.fullmatch(lower):
            stems.setdefault(numbered[1] + str(numbered[2] in "12"), []).append(name)
    found += [(names[0], names[1]) for names in map(sorted, stems.values()) if len(names) > 1]
    return next((pair for pair in found if usual is None or usual in pair), ())


def is_pair(pair: Sequence[str], task: str, option: str) -> InputError:
    """The error for two columns that are a pair, where the task reads one text."""
    return InputError(
        f"columns {brief(pair[0])} and {brief(pair[1])} are a pair of texts, and the task {task!r} "
        f"reads one; to train on one of them alone, name it with {option}"
    )


def is_flag(values: Iterable[Any]) -> bool:
    """Whether a column's values are 0 and 1, or yes and no.

    >>> is_flag([0, 1]), is_flag(["yes", "No"]), is_flag([1, 2])
    (True, True, False)
    """
    return {str(value).strip().lower() for value in values if not is_blank(value)} in _FLAGS


def flag(value: Any) -> bool | None:
    """What a cell of 0 or 1, or no or yes, says; None for another cell.

    >>> flag(1), flag("No"), flag(2)
    (True, False, None)
    """
    said = str(value).strip().lower()
    return said in _YES if any(said in pair for pair in _FLAGS) else None


def of_lists(columns: Sequence[str]) -> str:
    """A hint where columns hold lists or objects, as those with a tag for each word do."""
    if not columns:
        return ""
    return f" ({', '.join(columns)}: lists or objects, such as a tag for each word, are {NOT_YET})"


def several_labels(names: Sequence[str], place: str, option: str) -> InputError:
    """The error for columns of 0 and 1 each, of which nobody has named one as the label."""
    return InputError(
        f"columns {', '.join(map(brief, names[:8]))} of {place} look like several labels of one "
        f"row (multi-label), which is {NOT_YET}; to train on one of them alone, name it with "
        f"{option}"
    )
