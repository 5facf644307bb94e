"""What training and evaluation go without: counted, in words, by client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .names import FEW, listed

Indices = NDArray[np.int64]

Kind = Literal[
    "no-label",
    "no-text",
    "cut-text",
    "min-examples",
    "not-drawn",
    "no-client",
    "no-test-row",
    "other-client",
    "trained-before",
    "not-checked",
]


@dataclass(frozen=True)
class Omission:
    """Rows or clients that are left out, or used in part: how many, and a sentence about them."""

    kind: Kind
    count: int
    text: str


def of_rows(
    kind: Kind, rows: Indices, what: str, groups: Indices | None, names: Sequence[str] | None
) -> list[Omission]:
    """Describe some rows, with their number by natural client.

    Args:
        kind: why they are left out.
        rows: their numbers.
        what: the sentence's end for several rows, such as ``rows have no label``.
        groups: the natural client of every row of the data set; None: there are none.
        names: of the natural clients.

    Returns:
        One omission; none for no rows.
    """
    if not len(rows):
        return []
    by_client = f": {_most_first(np.bincount(groups[rows]), names)}" if groups is not None else ""
    return [Omission(kind, len(rows), f"{_count(len(rows), 'row')} {what}{by_client}")]


def of_held_out(
    kind: Kind, sizes: NDArray[np.integer], what: str, names: Sequence[str] | None
) -> Omission:
    """Describe held-out rows of K clients, who have ``sizes`` ``[K]`` of them."""
    count = int(sizes.sum())
    text = f"{_count(count, 'held-out row')} {what}: {_most_first(sizes, names)}"
    return Omission(kind, count, text)


def of_clients(
    kind: Kind,
    clients: Indices,
    what: str,
    names: Sequence[str] | None,
    sizes: NDArray[np.integer] | None = None,
) -> list[Omission]:
    """Describe some clients, with their names, or else numbers, and their ``sizes``.

    Returns:
        One omission; none for no clients.
    """
    if not len(clients):
        return []
    text = f"{_count(len(clients), 'client')} {what}: {_clients(clients, names, sizes)}"
    return [Omission(kind, len(clients), text)]


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _most_first(sizes: NDArray[np.integer], names: Sequence[str] | None) -> str:
    """The clients that have any rows, those with the most first."""
    order = np.argsort(-sizes, kind="stable")[: np.count_nonzero(sizes)]
    return _clients(order, names, sizes[order])


def _clients(
    clients: Indices, names: Sequence[str] | None, sizes: NDArray[np.integer] | None
) -> str:
    name: Callable[[int], str] = str if names is None else names.__getitem__
    shown = [name(int(client)) for client in clients[:FEW]]
    hidden = [""] * (len(clients) - len(shown))
    return listed(shown + hidden, None if sizes is None else sizes[:FEW].tolist())
