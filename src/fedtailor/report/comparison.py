"""The comparison of runs as text for a terminal, and as JSON."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence

from tabulate import tabulate

from ..run_format import as_json
from .cells import text_tables
from .read import StrPath, read_all
from .select import Metric
from .table import Table, table
from .text import whole

_WIDTH = 118
_COMMAND = "    "  # before a command, which stays on one line to be copied


def verdict_lines(comparison: Table) -> list[list[str]]:
    """Return each verdict in words, and what to do next: a line a sentence, and commands on lines
    of their own; with several, a verdict names its runs."""
    several = len(comparison.verdicts) > 1
    found = []
    for one in comparison.verdicts:
        runs = f"{', '.join(one.runs)}: " if several else ""
        first, *others = one.text
        lines = [f"Verdict: {runs}{first}", *(f"- {text}" for text in others)]
        for number, step in enumerate(one.steps):
            lines.append(f"{'' if number else 'Next: '}{step.text}")
            lines += [f"{_COMMAND}{step.command}"] if step.command else []
        found.append(lines)
    return found


def to_text(comparison: Table) -> str:
    """Format ``comparison`` for a terminal of 120 columns, with its verdict, caption and notes."""
    width = 18 if comparison.metric == "loss" else 28
    parts = [
        one.title
        + "\n"
        + tabulate(
            [[_wrapped(label, width), *cells] for label, *cells in one.marked()],
            headers=one.header,
            colalign=["left"] + ["right"] * (len(one.header) - 1),
            disable_numparse=True,
        )
        for one in text_tables(comparison)
    ]
    said = [
        "\n".join(line if line.startswith(_COMMAND) else _wrapped(line, _WIDTH) for line in lines)
        for lines in verdict_lines(comparison)
    ]
    below = [_wrapped(f"- {line}", _WIDTH) for line in [*comparison.caption, *comparison.notes]]
    return "\n\n".join([*parts, *said, "\n".join(below)])


def _wrapped(text: str, width: int) -> str:
    """Break a long text between words only, so that paths stay whole, and a number with its %."""
    indent = "  " if text.startswith("- ") else ""
    lines = textwrap.fill(
        whole(text), width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return lines.replace("\u00a0", " ")


def to_json(comparison: Table) -> str:
    """Format ``comparison`` as JSON in full precision; numbers that are not finite are null.

    >>> to_json(Table("accuracy", [], ["Test accuracy."], []))[:26]
    '{\\n  "metric": "accuracy",\\n'
    """
    content = dataclasses.asdict(comparison)
    for values, one in zip(content["verdicts"], comparison.verdicts, strict=True):
        values |= {"text": list(one.text), "next_step": one.next_step}
    return as_json(content, 2)


def compare(
    paths: StrPath | Sequence[StrPath], as_json: bool = False, metric: Metric | None = None
) -> str:
    """Compare the runs at ``paths``, one or several, as text or as JSON.

    ``metric`` is what is shown: accuracy, loss, or one of the experiment's own metrics. None: the
    one by which the runs select the reported round. The rounds stay the same.

    Raises:
        InputError: a path has no run with a committed round, or a file of a run is damaged.

    >>> compare("nowhere")
    Traceback (most recent call last):
    fedtailor.errors.InputError: no directory 'nowhere'; give one that `fedtailor run` wrote
    """
    comparison = table(read_all(paths), metric, short_notes=not as_json)
    return to_json(comparison) if as_json else to_text(comparison)
