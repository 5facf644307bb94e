"""The results of single clients: all of them where they have names and are few, and the worst."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..objectives.objective import OWN_METRIC
from ..store.metrics import Metric, bare, higher_is_better, sizes_of, unit_of, values_of
from ..store.records import EvaluationLine, Partition
from .select import Entry, reported
from .text import TextTable

MAX_NAMED = 20  # clients of a table that shows all of them
_WORST = 5  # clients of a method and seed, and at most a third of them
_WIDTH = 118  # columns of a terminal, with room for the edges


@dataclass(frozen=True)
class ClientRow:
    """One client of one run: its examples, and by method the mean test result over seeds (None: not
    evaluated, or no test examples)."""

    run: str
    client: str
    train: int
    test: int
    majority: float | None
    results: Mapping[str, float | None]
    metric: str = ""  # the client's own, where each has one


def worst_clients(evaluation: EvaluationLine, metric: Metric, count: int) -> list[int]:
    """Return the ``count`` clients with the worst results, the worst first.

    >>> accuracy = [0.5, None, 0.25]
    >>> e = EvaluationLine(3, "personal", "test", [4, 5, 6], [9, 0, 9], [0.1] * 3, accuracy)
    >>> worst_clients(e, "accuracy", 2)
    [6, 4]
    """
    sign = 1 if higher_is_better(metric) else -1
    values, sizes = values_of(evaluation, metric), sizes_of(evaluation, metric)
    results = [
        (-np.inf if value is None or np.isnan(value) else sign * value, client)
        for client, value, n in zip(evaluation.clients, values, sizes, strict=True)
        if n
    ]
    return [client for _, client in sorted(results)[:count]]


def client_rows(entries: Sequence[Entry], metric: Metric) -> list[ClientRow]:
    """Return a row for each client of the runs whose clients have names and are few."""
    by_run: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        partitions = entry.run.partitions.values()
        if all(part.names is not None and part.clients <= MAX_NAMED for part in partitions):
            by_run[str(entry.run.path)].append(entry)
    return [row for run, group in by_run.items() for row in _rows(run, group, metric)]


def _rows(run: str, entries: Sequence[Entry], metric: Metric) -> Iterator[ClientRow]:
    values: dict[tuple[str, str], list[float]] = defaultdict(list)  # by client and method
    majority: dict[str, list[float]] = defaultdict(list)
    sizes: dict[str, tuple[int, int]] = {}
    for entry in entries:
        for trial in entry.trials:
            partition = entry.run.partitions[trial.seed]
            for client in range(partition.clients):
                held = int(partition.train[client]), int(partition.test[client])
                sizes.setdefault(partition.name(client), held)
        for trial, selected in reported(entry):
            partition, test = entry.run.partitions[trial.seed], selected.test
            base = _majority(partition, test, metric)
            for client, value in zip(test.clients, values_of(test, metric), strict=True):
                name, known = partition.name(client), base[client]
                values[name, entry.label] += [] if value is None else [value]
                majority[name] += [] if known is None else [known]
    groups = entries[0].run.experiment.get("evaluate", {}).get("by_client", ())
    own_metrics = {name: one["metric"] for one in groups for name in one["clients"]}
    for name, (train, tested) in sizes.items():
        means = {entry.label: _mean(values[name, entry.label]) for entry in entries}
        own = own_metrics.get(name, "") if metric == OWN_METRIC else ""
        yield ClientRow(run, name, train, tested, _mean(majority[name]), means, own)


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _majority(
    partition: Partition, evaluation: EvaluationLine, metric: Metric
) -> dict[int, float | None]:
    """The accuracies of the clients' most frequent classes; None where they are not known, and
    beside another ``metric``, with which they can't be compared."""
    known = partition.majority_accuracy(evaluation.clients) if metric == "accuracy" else None
    return dict(zip(evaluation.clients, known or [None] * len(evaluation.clients), strict=True))


def client_tables(rows: Sequence[ClientRow], metric: Metric) -> list[TextTable]:
    """Format the rows: a table a run, or several side by side where methods are many."""
    tables = []
    for run in dict.fromkeys(row.run for row in rows):
        of_run = [row for row in rows if row.run == run]
        has_majority = any(row.majority is not None for row in of_run)
        for labels in _chunks(of_run, has_majority):
            header = ["client", *["metric"] * (metric == OWN_METRIC), "train", "test"]
            header += ["majority"] * has_majority + list(labels)
            cells = [_cells(row, labels, has_majority, metric) for row in of_run]
            more = f", {run}" if len({row.run for row in rows}) > 1 else ""
            title = f"Clients: examples, and test {metric}{unit_of(metric)}, mean over seeds{more}"
            tables.append(TextTable(title, header, cells))
    return tables


def _chunks(rows: Sequence[ClientRow], has_majority: bool) -> Iterator[list[str]]:
    """Yield as many labels at a time as fit beside the clients' names."""
    free = _WIDTH - max(len(row.client) for row in rows) - 20 - 12 * has_majority
    labels: list[str] = []
    for label in rows[0].results:
        if labels and sum(max(len(one), 5) + 4 for one in [*labels, label]) > free:
            yield labels
            labels = []
        labels.append(label)
    yield labels


def _cells(row: ClientRow, labels: Sequence[str], has_majority: bool, metric: Metric) -> list[str]:
    base = [bare("accuracy", row.majority)] * has_majority
    results = [bare(metric, row.results[label]) for label in labels]
    own = [row.metric] * (metric == OWN_METRIC)
    return [row.client, *own, f"{row.train:,}", f"{row.test:,}", *base, *results]


def worst_table(entries: Sequence[Entry], metric: Metric) -> TextTable:
    """Show the worst clients of every method and seed, by name or else by number."""
    cells = []
    for entry in entries:
        for trial, selected in reported(entry):
            partition, test = entry.run.partitions[trial.seed], selected.test
            results = dict(zip(test.clients, values_of(test, metric), strict=True))
            majority = _majority(partition, test, metric)
            shown = max(1, min(_WORST, len(test.clients) // 3))
            for client in worst_clients(test, metric, shown):
                cells.append([
                    entry.label, str(trial.seed), partition.name(client),
                    bare(metric, results[client]), bare("accuracy", majority[client]),
                    f"{partition.train[client]:,}", f"{partition.test[client]:,}",
                ])  # fmt: skip
    shown_metric = f"test {metric}{unit_of(metric)}"
    header = ["method", "seed", "client", shown_metric, "majority class", "train", "test"]
    if all(row[4] == "-" for row in cells):  # it is known of accuracies alone
        for row in (header, *cells):
            del row[4]
    return TextTable("The worst clients of every method and seed", header, cells)
