"""The comparison of runs as text for a terminal, and as JSON."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Sequence

from ..errors import InputError, listed, unknown
from ..store.format import as_json as to_json_text
from ..store.metrics import Metric, is_percentage
from ..store.read import StrPath, read_all
from ..store.selection import metric_of
from .cells import text_tables
from .differences import MethodResults, comparable_entries
from .numbers import bare
from .table import Table, table
from .text import TextTable, whole
from .untrained import untrained_notes

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
    said = [
        "\n".join(line if line.startswith(_COMMAND) else _wrapped(line, _WIDTH) for line in lines)
        for lines in verdict_lines(comparison)
    ]
    below = [_wrapped(f"- {line}", _WIDTH) for line in [*comparison.caption, *comparison.notes]]
    tables = [one.text(lambda label: _wrapped(label, width)) for one in text_tables(comparison)]
    return "\n\n".join([*tables, *said, "\n".join(below)])


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
        values |= {"next_step": one.next_step}
    return to_json_text(content, 2)


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
    metric = metric_of(runs) if metric is None else metric
    groups = comparable_entries(runs)
    if method not in (labels := [entry.label for members in groups for entry in members]):
        raise unknown("method", method, labels)
    members = next(group for group in groups if method in [entry.label for entry in group])
    results = {entry.label: MethodResults.of(entry, metric) for entry in members}
    base = results.pop(method)
    found = (one.ahead(base) for one in results.values())
    leads = sorted((one for one in found if one is not None), key=lambda one: -one.value)
    compared = {method, *(one.method for one in leads)}
    others = [label for label in labels if label not in compared]
    if not leads:
        raise InputError(
            f"--against {method}: no other method has results on the same clients"
            f"{f'; not {listed(others)}' if others else ''}"
        )
    if as_json:
        return to_json_text([dataclasses.asdict(one) for one in leads], 2)
    unit = "points" if is_percentage(metric) else metric
    rows = [
        [
            one.method,
            bare(metric, one.value, signed=True),
            " to ".join(bare(metric, end, signed=True) for end in (one.low, one.high))
            if one.has_interval
            else "-",
            one.words,
            f"{one.num_worse_off} of {one.num_clients} clients",
        ]
        for one in leads
    ]
    title = f"Test {metric}: how far each method is ahead of {method}"
    header = ["method", f"ahead ({unit})", "95 % interval", "these data show", "worse off"]
    entries = sorted(members, key=lambda entry: entry.label != method)
    notes = untrained_notes(entries, metric)
    notes += [f"{one.method}: {said}" for one in leads if (said := one.of_trained(metric))]
    notes += [f"Without results on the same clients: {listed(others)}"] if others else []
    return "\n".join([TextTable(title, header, rows, is_text={0, 3}).text(), *notes])
