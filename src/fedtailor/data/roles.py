"""What the columns of a table are: the model's inputs, the labels, the clients, of which task."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InputError, brief
from ..objectives import OBJECTIVES
from ..objectives.cells import usual_column
from ..objectives.objective import Objective, Roles
from .config import DataConfig

_IMAGE = ("image", "img")
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
    """Raise InputError where a table is surely for another task than the default one; ``option``
    stands before the names of what the user can set."""
    if found := recognised(values):
        task, roles = found
        names = [
            name for one in roles.values() for name in ((one,) if isinstance(one, str) else one)
        ]
        raise InputError(
            f"columns {', '.join(map(brief, names[:8]))} are those of another task: set "
            f"{option}task = {task.name!r}; to classify by one column, name it with {option}label"
        )


def find_roles(
    columns: Sequence[str],
    texts: Sequence[str],
    config: DataConfig,
    objective: Objective,
    option: str = "data.",
) -> tuple[tuple[str, ...], tuple[str, ...], str | None]:
    """Return which of a table's ``columns`` are the inputs (two, where these are pairs), the labels
    and the clients: those that ``config`` names, or those with usual names. ``texts`` are the
    columns of texts, and ``option`` stands before the names of what the user can set. Raises
    InputError where there is no such column, or one has two roles."""
    labels: tuple[str, ...] = ()
    if objective.reads_targets:
        named = config.label if isinstance(config.label, tuple) else (config.label,)
        free = (one for one in OBJECTIVES.values() if not (one.reads_targets or one.compares))
        hint = f"; set {option}task = {' or '.join(repr(one.name) for one in free)}, or"
        labels = tuple(
            find_column(columns, name, objective.target_names, f"{option}label", hint)
            for name in named
        )
    client = config.client
    if client is not None:
        find_column(columns, client, (), f"{option}client")
    texts = [name for name in texts if name not in (*labels, client)]
    sources = input_columns(columns, texts, config, objective, option)
    check_roles(sources, labels, client, option)
    return sources, labels, client


def input_columns(
    columns: Sequence[str],
    texts: Sequence[str],
    config: DataConfig,
    objective: Objective,
    option: str = "data.",
) -> tuple[str, ...]:
    """Return the one or two columns that the model reads, as `find_roles` does; ``texts`` have no
    other role."""
    if config.image is not None:
        if other := config.text or config.text_pair:
            raise InputError(
                f"data.text = {other!r} and data.image = {config.image!r}: an example has one "
                "input; leave one of the two out"
            )
        return (find_column(columns, config.image, _IMAGE, f"{option}image"),)
    if pair := named_pair(texts, config, objective, option):
        return tuple(
            find_column(columns, name, (), f"{option}{role}") for role, name in pair.items()
        )
    usual = objective.input_names
    if config.text is None and usual_column(usual, columns) is None and objective.takes_images:
        usual = (*usual, *_IMAGE)
    return (find_column(columns, config.text, usual, f"{option}text"),)


def check_roles(
    sources: Sequence[str], labels: Sequence[str], client: str | None, option: str
) -> None:
    """Raise InputError where a column has two roles; ``option`` stands before their names."""
    for number, label in enumerate(labels):
        if label in labels[:number]:
            raise InputError(f"{option}label names column {label!r} twice; name it once")
    if client is not None and client in labels:
        raise InputError(
            f"{option}label and {option}client both name {client!r}, so each client would have one "
            "class; name another column (or divide by class: split.scheme = 'pathological')"
        )
    for number, source in enumerate(sources):
        if source in sources[:number]:
            raise InputError(f"both texts of an input are column {source!r}; name another one")
        if source in (*labels, client):
            role = "label" if source in labels else "client"
            raise InputError(
                f"the model's input and {option}{role} are both column {source!r}, so the input "
                f"would give the {role} away; name another column"
            )


def named_pair(
    texts: Sequence[str], config: DataConfig, objective: Objective, option: str = "data."
) -> dict[str, str | None]:
    """The columns of the two texts of an input, by role: those that are named, or of the columns
    ``texts`` two that are called like a pair; none where an input is one text. Raises InputError
    where the task can't have pairs, or one of the two is named alone."""
    if objective.joins_columns:
        return {}
    if config.text_pair is not None and not objective.takes_pairs:
        raise InputError(
            f"{option}text_pair = {config.text_pair!r}: the task {objective.name!r} reads one "
            "text; leave it out"
        )
    if objective.second_names or config.text_pair is not None:
        return {
            "text": config.text or usual_column(objective.input_names, texts),
            "text_pair": config.text_pair or usual_column(objective.second_names, texts),
        }
    if config.text is not None:
        return {}
    found = pair_of(texts, usual_column(objective.input_names, texts))
    if found and not objective.takes_pairs:
        raise InputError(
            f"columns {brief(found[0])} and {brief(found[1])} are a pair of texts, and the task "
            f"{objective.name!r} reads one; to train on one of them alone, name it with "
            f"{option}text"
        )
    return dict(zip(("text", "text_pair"), found, strict=False))


def find_column(
    columns: Sequence[str], name: str | None, usual: Sequence[str], option: str, hint: str = ";"
) -> str:
    """Return the column called ``name``; None: the first one with a ``usual`` name. ``option`` is
    what the user can set, and ``hint`` what else a message says. Raises InputError where there is
    none."""
    for candidate in usual if name is None else (name,):
        if candidate in columns:
            return candidate
    listed = ", ".join(map(str, columns))
    if name is not None:
        raise InputError(f"no column {name!r} for {option}; columns: {listed}")
    raise InputError(f"no column has a usual name for {option}{hint} name it; columns: {listed}")
