"""The comparison of methods: one row a method, notes, and a verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..store.metrics import Metric
from ..store.read import Run
from ..store.selection import metric_of
from .clients import ClientRow, client_rows
from .differences import comparable_entries
from .notes import caption, footnotes
from .rows import Majority, ModelResult, Row, majority_rows, row_of
from .select import entries
from .untrained import untrained_notes
from .verdict import Verdict, verdict


@dataclass(frozen=True)
class Table:
    """The rows in the experiments' order, a caption that describes them, notes to read before
    comparing them, and verdicts: one for all runs that have the same clients."""

    metric: Metric
    rows: Sequence[Row]
    caption: Sequence[str]
    notes: Sequence[str]
    majority_class: Sequence[Majority] = ()  # one a run; runs with equal ones share it
    clients: Sequence[ClientRow] = ()  # where clients have names and are few
    verdicts: Sequence[Verdict] = ()
    chosen_by: Metric = ""  # of the validation results that choose a method


def table(runs: Sequence[Run], metric: Metric | None = None, *, short_notes: bool = False) -> Table:
    """Compare all methods in ``runs`` by ``metric``; with ``short_notes`` few clients are named."""
    metric = metric_of(runs, metric)
    all_entries = entries(runs)
    chosen_by = metric_of(runs)
    groups = comparable_entries(runs)
    place = {entry.label: k for k, members in enumerate(groups) for entry in members}
    rows = [row_of(entry, metric, chosen_by, place[entry.label]) for entry in all_entries]
    majority = majority_rows(all_entries, metric)
    results = [row.personal_model for row in rows if row.personal_model is not None]
    without_examples = [max(result.without_examples) for result in results]
    by_validation = all(r.by_validation for r in results)
    return Table(
        metric=metric,
        rows=rows,
        caption=caption(runs, metric, by_validation=by_validation, has_majority=bool(majority)),
        notes=[
            *footnotes(runs, without_examples, short=short_notes),
            *_undefined(results),
            *untrained_notes(all_entries, metric),
        ],
        majority_class=majority,
        clients=client_rows(all_entries, metric),
        verdicts=[
            verdict(members, [row for row in rows if row.group == k], metric)
            for k, members in enumerate(groups)
        ],
        chosen_by=chosen_by,
    )


def _undefined(results: Sequence[ModelResult]) -> Iterator[str]:
    for name in dict.fromkeys(name for result in results for name in result.metric_clients):
        counts = [(one.clients, one.metric_clients.get(name, one.clients)) for one in results]
        most = max(
            n - m
            for with_examples, known in counts
            for n, m in zip(with_examples, known, strict=True)
        )
        if most:
            yield (
                f"{name} is undefined for up to {most} of the clients that have test examples; "
                "they are left out of its mean"
            )
