"""Tables in Markdown."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from tabulate import tabulate


def markdown_table(
    header: Sequence[str], rows: Sequence[Sequence[Any]], words: Collection[int] = (0,)
) -> str:
    """A table whose columns at ``words`` hold words, and all others numbers, which stand at the
    right."""
    align = ["left" if column in words else "right" for column in range(len(header))]
    return tabulate(rows, headers=header, tablefmt="pipe", colalign=align, disable_numparse=True)


def on_one_line(text: str) -> str:
    """The text with intervals, as in ``1.2 (0.9 to 1.5)``, at whose spaces no line ends."""
    return re.sub(r"(\S+) \((\S+) to (\S+)\)", "\\1\xa0(\\2\xa0to\xa0\\3)", text)
