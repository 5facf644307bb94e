"""Tables in Markdown."""

from __future__ import annotations

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
