"""Which columns of a table are the model's input, the labels and the clients."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import InputError, brief
from ..objectives.objective import Objective
from . import other_tasks
from .config import DataConfig


def check_roles(
    sources: Sequence[str], labels: Sequence[str], client: str | None, option: str
) -> None:
    """Raise InputError where a column has two roles; ``option`` and a role are what the user can
    set."""
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
    texts: Sequence[str], config: DataConfig, objective: Objective, option: str = "data.text"
) -> dict[str, str | None]:
    """The columns of the two texts of an input, by role: those that are named, or of the columns
    ``texts`` two that are called like a pair; none where an input is one text. Raises InputError
    where the task can't have pairs, or one of the two is named alone."""
    if objective.joins_columns:
        return {}
    if config.text_pair is not None and not objective.takes_pairs:
        raise InputError(
            f"data.text_pair = {config.text_pair!r}: the task {objective.name!r} reads one text; "
            "leave it out"
        )
    if objective.second_names or config.text_pair is not None:
        return {
            "text": config.text or usual_column(objective.input_names, texts),
            "text_pair": config.text_pair or usual_column(objective.second_names, texts),
        }
    if config.text is not None:
        return {}
    found = other_tasks.pair_of(texts, usual_column(objective.input_names, texts))
    if found and not objective.takes_pairs:
        raise InputError(
            f"columns {brief(found[0])} and {brief(found[1])} are a pair of texts, and the task "
            f"{objective.name!r} reads one; to train on one of them alone, name it with {option}"
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


def usual_column(usual: Sequence[str], names: Sequence[str]) -> str | None:
    """Return the first of ``usual`` that is one of the columns ``names``.

    >>> usual_column(["text", "content"], ["label", "content"])
    'content'
    """
    return next((name for name in usual if name in names), None)
