"""Tables of formatted cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TextTable:
    """A table of formatted cells; the first column names what a row is about.

    ``best`` has the positions (row, column) of the best cells of their columns.
    """

    title: str
    header: Sequence[str]
    cells: Sequence[Sequence[str]]
    best: frozenset[tuple[int, int]] = frozenset()

    def marked(self) -> list[list[str]]:
        """Return the cells, with a star before the best ones.

        >>> TextTable("t", ["m", "x"], [["a", "1"], ["b", "2"]], frozenset({(1, 1)})).marked()
        [['a', '1'], ['b', '*2']]
        """
        return [
            [f"*{text}" if (y, x) in self.best else text for x, text in enumerate(row)]
            for y, row in enumerate(self.cells)
        ]
