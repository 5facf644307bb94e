"""Tables of formatted cells."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from html import escape

from tabulate import tabulate


@dataclass(frozen=True)
class TextTable:
    """A table of formatted cells; the first column names what a row is about.

    ``best`` has the positions (row, column) of the best cells of their columns. ``levels`` are by
    position, too: how strong the colour behind a cell is, in percent.
    ``note`` says what the table leaves out.
    """

    title: str
    header: Sequence[str]
    cells: Sequence[Sequence[str]]
    best: frozenset[tuple[int, int]] = frozenset()
    keys: Sequence[str] = ()  # one a row, by which the page's script knows it
    levels: Mapping[tuple[int, int], int] = field(default_factory=dict)
    note: str = ""
    is_text: Set[int] = frozenset({0})  # columns that are aligned on the left

    @property
    def _align(self) -> list[str] | None:
        """None for an empty table, which tabulate 0.9 aligns not."""
        places = range(len(self.header))
        return ["left" if x in self.is_text else "right" for x in places] if self.cells else None

    @property
    def flat_header(self) -> list[str]:
        """The header without line breaks."""
        return [name.replace("\n", " ") for name in self.header]

    def csv(self) -> str:
        """Return the table as CSV; names that a spreadsheet would compute get a '."""
        text = io.StringIO()
        rows = ([inert(cell) for cell in row] for row in [self.flat_header, *self.cells])
        csv.writer(text, lineterminator="\n").writerows(rows)
        return text.getvalue()

    def text(self, wrapped: Callable[[str], str] = str) -> str:
        """Return the table for a terminal; ``wrapped`` breaks the names of rows into lines."""
        rows = [[wrapped(name), *cells] for name, *cells in self.marked()]
        table = tabulate(rows, self.header, colalign=self._align, disable_numparse=True)
        return f"{self.title}\n{table}"

    def html(self) -> str:
        """Return the table as HTML, below its title."""
        table = tabulate(self.marked(), self.flat_header, tablefmt="html", disable_numparse=True)
        return f"<p>{escape(self.title)}</p>\n{table}"

    def latex(self) -> str:
        """Return the table as LaTeX, for the package booktabs; the best cells are bold."""
        text = tabulate(
            self.cells,
            headers=self.flat_header,
            tablefmt="latex_booktabs",
            colalign=self._align,
            disable_numparse=True,
        )
        lines = text.replace("±", "$\\pm$").splitlines()
        first = lines.index("\\midrule") + 1
        for y, row in enumerate(self.cells):
            # LaTeX takes a [ or a * for an argument of the line's end or rule before it
            line = re.sub(r"^ ([\[*])", r" {\1}", lines[first + y])
            parts = re.split(r"(?<!\\)&", line.removesuffix("\\\\"))
            if len(parts) == len(row):
                for x, part in enumerate(parts):
                    if (y, x) in self.best:
                        parts[x] = f" \\textbf{{{part.strip()}}} "
            lines[first + y] = "&".join(parts) + "\\\\"
        return "\n".join(lines) + "\n"

    def marked(self) -> list[list[str]]:
        """Return the cells, with a star before the best ones.

        >>> TextTable("t", ["m", "x"], [["a", "1"], ["b", "2"]], frozenset({(1, 1)})).marked()
        [['a', '1'], ['b', '*2']]
        """
        return [
            [f"*{text}" if (y, x) in self.best else text for x, text in enumerate(row)]
            for y, row in enumerate(self.cells)
        ]


_NUMBER = re.compile(r"[+-]?(\d[\d,]*(\.\d*)?(±[\d.]+)?( ?[kMGT]?(B|FLOP|s)?| ?%)|inf|nan)?")


def inert(text: str) -> str:
    """Put a ' before a name that a spreadsheet would compute: clients choose their names. A name
    that begins with a ' gets one, too, so that a program can take it away again.

    >>> [inert(text) for text in ("=1+1", "@SUM(A1)", "'a", "-3.2", "+1.5±0.2", "-")]
    ["'=1+1", "'@SUM(A1)", "''a", '-3.2', '+1.5±0.2', '-']
    """
    is_formula = text.startswith(("=", "+", "-", "@", "'", "\t", "\r"))
    return f"'{text}" if is_formula and not _NUMBER.fullmatch(text) else text


def markdown(text: str) -> str:
    """Put a \\ before what Markdown would read as more than text, in a cell of a table, too.

    >>> print(markdown("a|b_c <i> [x](y)"), markdown("_x_ *y* $5 &lt; R&D"))
    a\\|b_c \\<i\\> \\[x\\](y) \\_x\\_ \\*y\\* \\$5 \\&lt; R&D
    """
    return re.sub(r"[\\`*\[\]<>|~$#]|(?<![^\W_])_|_(?![^\W_])|&(?=#?\w+;)", r"\\\g<0>", text)


def option(name: str, value: str) -> list[str]:
    """Return the words of a command that give an option its value.

    >>> option("--client", "ward 7"), option("--client", "-7a")
    (['--client', 'ward 7'], ['--client=-7a'])
    """
    return [f"{name}={value}"] if value.startswith("-") else [name, value]


def whole(text: str) -> str:
    """Keep a number and its % on one line, by a space that does not break."""
    return text.replace(" %", "\u00a0%")
