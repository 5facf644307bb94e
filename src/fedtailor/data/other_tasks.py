"""What a table is for, told by its columns: pairs of texts, other tasks than the default one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InputError, brief
from ..objectives import OBJECTIVES
from ..objectives.objective import Objective, Roles

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


def recognised(columns: Mapping[str, Sequence[Any]]) -> tuple[Objective, Roles] | None:
    """Return the task that a table is surely for, by the first values of its columns, and which
    columns it reads; None: a text or a picture and a label, or texts alone."""
    found = ((one, one.recognised(columns)) for one in OBJECTIVES.values())
    return next(((one, roles) for one, roles in found if roles), None)


def check_default(values: Mapping[str, Sequence[Any]], option: str) -> None:
    """Raise InputError where a table is surely for another task than the default one; ``option`` is
    what the user can set."""
    if found := recognised(values):
        task, roles = found
        names = [
            name for one in roles.values() for name in ((one,) if isinstance(one, str) else one)
        ]
        raise InputError(
            f"columns {', '.join(map(brief, names[:8]))} are those of another task: set "
            f"{option}task = {task.name!r}; to classify by one column, name it with {option}label"
        )
