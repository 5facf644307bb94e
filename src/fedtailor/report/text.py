"""Tables of formatted cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TextTable:
    """A table of formatted cells; the first column names what a row is about."""

    title: str
    header: Sequence[str]
    cells: Sequence[Sequence[str]]
