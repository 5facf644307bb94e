"""The comparison of runs as text for a terminal, and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from ..errors import InputError, listed, unknown
from ..store.format import as_json as to_json_text
from ..store.metrics import Metric
from ..store.read import StrPath, read_all
from ..store.selection import metric_of
from .cells import text_tables
from .differences import MethodResults, ahead_of, comparable_entries, difference_table
from .select import choose
from .table import Table, table
from .text import TextTable, whole
from .untrained import untrained_notes

_WIDTH = 118
_COMMAND = "    "  # before a command, which stays on one line to be copied


def verdict_lines(comparison: Table) -> Iterator[tuple[list[str], TextTable | None]]:
    """Yield each verdict, a line a sentence, the last one with the command to go on with; and its
    table of differences. With several, a verdict names its runs."""
    for one in comparison.verdicts:
        runs = f"{', '.join(one.runs)}: " if len(comparison.verdicts) > 1 else ""
        first, *others = one.text
        lines = [f"Verdict: {runs}{first}", *(f"- {text}" for text in others)]
        lines += ["Next:", f"{_COMMAND}{one.next_step}"] if one.next_step else []
        yield lines, difference_table(one.differences, one.metric) if one.differences else None


def to_text(comparison: Table) -> str:
    """Format ``comparison`` for a terminal of 120 columns, with its verdict, caption and notes."""
    width = 18 if comparison.metric == "loss" else 28
    parts = [one.text(lambda label: _wrapped(label, width)) for one in text_tables(comparison)]
    for lines, differences in verdict_lines(comparison):
        parts += [differences.text()] if differences else []
        parts.append("\n".join(x if x.startswith(_COMMAND) else _wrapped(x, _WIDTH) for x in lines))
    below = [_wrapped(f"- {line}", _WIDTH) for line in [*comparison.caption, *comparison.notes]]
    return "\n\n".join([*parts, "\n".join(below)])


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
    return to_json_text(comparison, 2)


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


def against(
    paths: StrPath | Sequence[StrPath],
    method: str,
    as_json: bool = False,
    metric: Metric | None = None,
) -> str:
    """Return how far every method of the runs at ``paths`` is ahead of ``method`` on test data, the
    farthest first, where the runs divide the same data alike, as text or as JSON."""
    runs = read_all(paths)
    metric = metric_of(runs, metric)
    groups = {one.label: members for members in comparable_entries(runs) for one in members}
    if method not in groups:
        raise unknown("method", method, groups)
    members = groups[method]
    results = MethodResults.of_all(members, metric, choose(members).seeds)
    leads = ahead_of(method, results)
    compared = {method, *(one.method for one in leads)}
    others = [label for label in groups if label not in compared]
    if not leads:
        raise InputError(
            f"--against {method}: no other method has results on the same clients"
            f"{f'; not {listed(others)}' if others else ''}"
        )
    if as_json:
        return to_json_text(leads, 2)
    entries = sorted(members, key=lambda entry: entry.label != method)
    notes = untrained_notes(entries, metric)
    notes += [f"{said}." for one in leads if (said := one.of_trained(metric))]
    notes += [f"Without results on the same clients: {listed(others)}"] if others else []
    return "\n".join([difference_table(leads, metric).text(), *notes])
