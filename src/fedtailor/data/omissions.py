"""What training and evaluation go without, or must know of: counted, in words, by client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import FEW, listed
from ..units import counted

Indices = NDArray[np.int64]

_SHORT = 3  # clients that the short sentence names

Kind = Literal[
    "client-blanks", "label-blanks", "labels-split", "no-label", "label-like-none",
    "no-row-of-class", "no-text", "cut-text", "no-end", "repeated", "min-examples", "not-drawn",
    "no-client", "no-test-row", "other-client", "trained-before", "few-test-rows", "not-checked",
]  # fmt: skip


@dataclass(frozen=True)
class Omission:
    """Rows or clients that are left out, used in part, or not what they seem: how many, and a
    sentence about them.

    ``short`` is the sentence with fewer names; empty where ``text`` is short."""

    kind: Kind
    count: int
    text: str
    short: str = ""


def of_rows(
    kind: Kind, rows: Indices, what: str, groups: Indices | None, names: Sequence[str] | None
) -> list[Omission]:
    """Describe some ``rows``, if there are any, with their number by natural client: ``groups`` has
    that of every row of the data set, ``names`` the clients' names. ``what`` ends the sentence."""
    if not len(rows):
        return []
    text = f"{counted(len(rows), 'row')} {what}"
    if groups is None:
        return [Omission(kind, len(rows), text)]
    return [_omission(kind, len(rows), text, *_most_first(np.bincount(groups[rows])), names)]


def of_held_out(
    kind: Kind, sizes: NDArray[np.integer], what: str, names: Sequence[str] | None
) -> Omission:
    """Describe held-out rows of K clients, who have ``sizes`` ``[K]`` of them."""
    count = int(sizes.sum())
    text = f"{counted(count, 'held-out row')} {what}"
    return _omission(kind, count, text, *_most_first(sizes), names)


def of_clients(
    kind: Kind,
    clients: Indices,
    what: str,
    names: Sequence[str] | None,
    sizes: NDArray[np.integer] | None = None,
) -> list[Omission]:
    """Describe some clients, if there are any, with names, or else numbers, and ``sizes``."""
    if not len(clients):
        return []
    text = f"{counted(len(clients), 'client')} {what}"
    return [_omission(kind, len(clients), text, clients, sizes, names)]


def _most_first(sizes: NDArray[np.integer]) -> tuple[NDArray[np.integer], NDArray[np.integer]]:
    """The clients that have any rows, those with the most first, and their sizes."""
    order = np.argsort(-sizes, kind="stable")[: np.count_nonzero(sizes)]
    return order, sizes[order]


def _omission(
    kind: Kind,
    count: int,
    what: str,
    clients: NDArray[np.integer],
    sizes: NDArray[np.integer] | None,
    names: Sequence[str] | None,
) -> Omission:
    """The sentence ``what``, with the clients."""
    name: Callable[[int], str] = str if names is None else names.__getitem__
    shown = [name(int(client)) for client in clients[:FEW]] + [""] * (len(clients) - FEW)
    counts = None if sizes is None else sizes[:FEW].tolist()
    text = f"{what}: {listed(shown, counts)}"
    if len(clients) <= _SHORT + 2:
        return Omission(kind, count, text)
    return Omission(kind, count, text, f"{what}: {listed(shown, counts, _SHORT)}")
