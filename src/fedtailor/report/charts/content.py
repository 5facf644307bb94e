"""What the page's charts show, as JSON: lists by column, since names by row would double its size.

A *group* is the clients of one division: those of a run with one seed, and of all other runs that
divide the same data alike. Clients go by their position among the group's shown clients.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ...store.metrics import Metric, box_of, higher_is_better, scale_of, summary, unit_of
from ...store.records import Partition
from ...store.selection import by_round
from ..costs import COSTS, costs_of, front, is_wide, mean_of
from ..differences import Division, division_of
from ..select import Entry, reported, scores
from ..table import Table

MAX_CLIENTS = 200  # of a group; of more, evenly spaced ones are shown
_MAX_ROUNDS = 25  # of one client's curves

Json = dict[str, Any]


@dataclass(frozen=True)
class ClientGroup:
    """The shown clients of one division."""

    number: int
    title: str
    partition: Partition
    clients: Sequence[int]  # their numbers

    @cached_property
    def place(self) -> Mapping[int, int]:
        """The positions of the shown clients, by number."""
        return {client: position for position, client in enumerate(self.clients)}


Groups = Mapping[Division, ClientGroup]


def groups(entries: Sequence[Entry]) -> Groups:
    """Return the divisions of all runs."""
    found: dict[Division, ClientGroup] = {}
    several = len({str(entry.run.path) for entry in entries}) > 1
    for entry in entries:
        for trial in entry.trials:
            partition = entry.run.partitions[trial.seed]
            count = min(partition.clients, MAX_CLIENTS)
            clients = np.linspace(0, partition.clients - 1, count).astype(int).tolist()
            title = f"{entry.run_name}, seed {trial.seed}" if several else f"seed {trial.seed}"
            group = ClientGroup(len(found), title, partition, clients)
            found.setdefault(division_of(entry.run, trial.seed), group)
    return found


def content(entries: Sequence[Entry], comparison: Table, of: Groups) -> Json:
    """Return what all charts but the methods' pictures show."""
    metric = comparison.metric
    return {
        "metric": {
            "name": metric,
            "axis": metric + unit_of(metric),
            "isPercentage": scale_of(metric)[0] == 100,
            "higher": higher_is_better(metric),
        },
        "methods": [entry.label for entry in entries],
        "groups": [_group(group) for group in of.values()],
        "curves": columns_of(_curves(entries, metric)),
        "results": columns_of(_results(entries, metric, of)),
        "boxes": columns_of(_boxes(entries, metric)),
        "costs": columns_of(_costs(entries, metric)),
        "ahead": columns_of(_ahead(comparison)),
        "confusion": list(_confusions(entries)),
        "clientCurves": list(_client_curves(entries, metric, of)),
    }


def number(value: float | None, digits: int = 4) -> float | None:
    """Round to significant digits; None for what is not finite, for which JSON has no form.

    >>> number(0.123456), number(float("nan"))
    (0.1235, None)
    """
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


def columns_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Turn rows into columns."""
    columns: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return columns


def _group(group: ClientGroup) -> Json:
    partition, clients = group.partition, group.clients
    labels = None if partition.labels is None else partition.labels[clients].tolist()
    clusters = None if partition.clusters is None else partition.clusters[clients].tolist()
    order = [] if labels is None else sorted(range(len(clients)), key=lambda k: (
        clusters[k] if clusters else 0, labels[k].index(max(labels[k])), -max(labels[k])
    ))  # fmt: skip
    return {
        "title": group.title,
        "names": [partition.name(client) for client in clients],
        "train": partition.train[clients].tolist(),
        "validation": partition.validation[clients].tolist(),
        "test": partition.test[clients].tolist(),
        "classes": list(partition.classes),
        "labels": labels,
        "clusters": clusters,
        "order": order,
        "all": partition.clients,
    }


def _curves(entries: Sequence[Entry], metric: Metric) -> Iterator[Json]:
    """Means over clients, by method, split and round: mean and deviation over seeds."""
    factor = scale_of(metric)[0]
    for position, entry in enumerate(entries):
        rounds = [selected.round for _, selected in reported(entry)]
        for split in ("validation", "test"):
            curves = [by_round(trial, "personal", split) for trial in entry.trials]
            for when in sorted(set().union(*curves)):
                x = [factor * summary(c[when], metric).mean for c in curves if when in c]
                yield {
                    "method": position,
                    "split": split,
                    "round": when,
                    "value": number(float(np.mean(x))),
                    "std": number(float(np.std(x, ddof=1))) if len(x) > 1 else 0,
                    "reported": rounds.count(when),
                }


def _results(entries: Sequence[Entry], metric: Metric, of: Groups) -> Iterator[Json]:
    factor = scale_of(metric)[0]
    for position, entry in enumerate(entries):
        for trial, selected in reported(entry):
            group = of[division_of(entry.run, trial.seed)]
            for client, value, _ in scores(selected.test, metric):
                if (at := group.place.get(client)) is not None:
                    where = {"method": position, "group": group.number, "client": at}
                    yield where | {"value": number(factor * value)}


def _boxes(entries: Sequence[Entry], metric: Metric) -> Iterator[Json]:
    factor = scale_of(metric)[0]
    for position, entry in enumerate(entries):
        x = [
            factor * value
            for _, selected in reported(entry)
            for _, value, _ in scores(selected.test, metric)
            if math.isfinite(value)
        ]
        if x:
            names = ("p10", "p25", "p50", "p75", "p90")
            box = dict(zip(names, map(number, box_of(x)), strict=True))
            yield {"method": position, **box, "clients": len(x)}


def _costs(entries: Sequence[Entry], metric: Metric) -> Iterator[Json]:
    """Results beside those costs that were measured for all methods, means over seeds, and where
    the methods on each front have their names."""
    rows = []
    for position, entry in enumerate(entries):
        found = reported(entry)
        results = [scale_of(metric)[0] * summary(one.test, metric).mean for _, one in found]
        if results and math.isfinite(float(np.mean(results))):
            costs = [costs_of(entry, trial, selected.round) for trial, selected in found]
            means = {cost: number(mean_of(one[cost] for one in costs)) for cost in COSTS}
            rows.append({"method": position, "value": number(float(np.mean(results))), **means})
    measured = [cost for cost in COSTS if rows and all(row[cost] is not None for row in rows)]
    named = {f"{cost}Named": _named(rows, cost, metric) for cost in measured}
    for position, row in enumerate(rows):
        kept = {name: row[name] for name in ("method", "value", *measured)}
        yield kept | {name: sides[position] for name, sides in named.items()}


_BESIDE = (0.3, 0.06)  # how far apart names must stand, as shares of a chart's width and height


def _named(rows: Sequence[Json], cost: str, metric: Metric) -> list[str]:
    """On which side of their points methods of a front have their names; empty without room."""
    costs, results = [row[cost] for row in rows], [row["value"] for row in rows]
    on_front = front([*zip(costs, results, strict=True)], higher_is_better=higher_is_better(metric))
    positive = is_wide(costs)
    x = _shares([0, *(np.log1p(np.array(costs) / positive) if positive else costs)])[1:]
    y = _shares(results)
    named: list[int] = []
    for one in sorted(np.flatnonzero(on_front), key=lambda k: -x[k]):
        near = (abs(x[k] - x[one]) < _BESIDE[0] and abs(y[one] - y[k]) < _BESIDE[1] for k in named)
        if not any(near):
            named.append(int(one))
    sides = ["left" if at > 0.6 else "right" for at in x]
    return [sides[k] if k in named else "" for k in range(len(rows))]


def _shares(values: Any) -> list[float]:
    x = np.asarray(values, dtype=np.float64)
    shares: list[float] = ((x - x.min()) / (np.ptp(x) or 1)).tolist()
    return shares


def _ahead(comparison: Table) -> Iterator[Json]:
    """How far each method is ahead of training alone, with an interval if clients are enough."""
    factor = scale_of(comparison.metric)[0]
    labels = [row.label for row in comparison.rows]
    for verdict in comparison.verdicts:
        for one in verdict.against_alone:
            yield {
                "method": labels.index(one.method),
                "value": number(factor * one.value),
                "low": number(factor * one.low) if one.has_interval else None,
                "high": number(factor * one.high) if one.has_interval else None,
                "clients": one.num_clients,
                "worseOff": one.num_worse_off,
                "reading": one.words,
            }


_MAX_CLASSES = 40


def _confusions(entries: Sequence[Entry]) -> Iterator[Json]:
    for position, entry in enumerate(entries):
        counts = [
            tensors["personal/test"].sum(0)
            for trial, selected in reported(entry)
            if "personal/test" in (tensors := trial.confusion(selected.round))
        ]
        if counts and len(counts[0]) <= _MAX_CLASSES:
            classes = list(next(iter(entry.run.partitions.values())).classes)
            total = np.sum(counts, axis=0)
            yield {"method": position, "classes": classes, "counts": total.tolist()}


def _client_curves(entries: Sequence[Entry], metric: Metric, of: Groups) -> Iterator[Json]:
    factor = scale_of(metric)[0]
    for position, entry in enumerate(entries):
        for trial in entry.trials:
            tests = by_round(trial, "personal", "test")
            rounds = sorted(tests)
            kept = np.linspace(0, len(rounds) - 1, min(len(rounds), _MAX_ROUNDS)).round()
            rounds = [rounds[int(at)] for at in sorted(set(kept.tolist()))]
            group = of[division_of(entry.run, trial.seed)]
            values = np.full((len(rounds), len(group.clients)), np.nan)
            for row, when in enumerate(rounds):
                for client, value, _ in scores(tests[when], metric):
                    if (at := group.place.get(client)) is not None:
                        values[row, at] = factor * value
            yield {
                "method": position,
                "group": group.number,
                "rounds": rounds,
                "values": [[number(x, 3) for x in row] for row in values.tolist()],
            }
