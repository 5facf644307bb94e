"""Results under simulated attacks as maps: methods by attacks, one map a model and measure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .names import attack_name
from .numbers import scale_of
from .read import attack_of
from .select import ATTACK_SUCCESS, Entry, Metric, unit_of
from .table import Result, Row, Table
from .text import TextTable

_APART = {"attack", "engine", "format", "methods", "name", "seeds"}
_LEVELS = 45  # percent of the colour of the largest value, on which text can still be read


@dataclass(frozen=True)
class _Cell:
    """One method of one run under one attack."""

    method: str
    attack: str
    row: Row


def attack_maps(entries: Sequence[Entry], comparison: Table) -> list[TextTable]:
    """Return a map of the methods' results by attack, for each model; none without attacks.

    ``entries`` are those behind the comparison's rows. Methods of several runs share a row where
    their settings differ in the attack alone.
    """
    runs = {id(entry.run): entry.run for entry in entries}
    if not any(attack_of(run.experiment).kind != "none" for run in runs.values()):
        return []
    settings = {json.dumps(_settings(entry), sort_keys=True): entry for entry in entries}
    labels = [_label(entry) for entry in settings.values()]
    names = {
        key: f"{_label(entry)} ({entry.run_name})" if labels.count(_label(entry)) > 1
        else _label(entry)
        for key, entry in settings.items()
    }  # fmt: skip
    cells = [
        _Cell(
            names[json.dumps(_settings(e), sort_keys=True)],
            _attack(e),
            row,
        )
        for e, row in zip(entries, comparison.rows, strict=True)
    ]
    return list(_maps(cells, comparison.metric))


def _label(entry: Entry) -> str:
    return entry.trials[0].label


def _settings(entry: Entry) -> dict[str, Any]:
    """All that a method's result depends on, but for the attack and the seeds."""
    experiment = {k: v for k, v in entry.run.experiment.items() if k not in _APART}
    methods = entry.run.experiment["methods"]
    own = next(method for method in methods if method["label"] == _label(entry))
    return {"experiment": experiment, "method": own}


def _attack(entry: Entry) -> str:
    return attack_name(attack_of(entry.run.experiment))


def _maps(cells: Sequence[_Cell], metric: Metric) -> Iterator[TextTable]:
    models = {"Personal models": "personal_model", "Global models": "global_model"}
    shown: Mapping[Metric, str] = {metric: metric, ATTACK_SUCCESS: "attack success"}
    for one, what in shown.items():
        for title, model in models.items():
            values = {
                (cell.method, cell.attack): found
                for cell in cells
                if (found := _mean(cells, cell, model, one, metric)) is not None
            }
            if values:
                yield _map(f"{title}: test {what}{unit_of(one)}", cells, values, one)


def _mean(
    cells: Sequence[_Cell], like: _Cell, model: str, metric: Metric, shown: Metric
) -> float | None:
    """The mean over all seeds of the cells in one place."""
    values = []
    for cell in cells:
        if (cell.method, cell.attack) == (like.method, like.attack):
            result: Result | None = getattr(cell.row, model)
            spread = None
            if result is not None:
                spread = result.mean if metric == shown else result.metrics.get(metric)
            if spread is not None:
                values += [spread.mean] * len(cell.row.seeds)
    return sum(values) / len(values) if values else None


def _map(
    title: str, cells: Sequence[_Cell], values: Mapping[tuple[str, str], float], metric: Metric
) -> TextTable:
    finite = [value for value in values.values() if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    known = [cell for cell in cells if (cell.method, cell.attack) in values]
    methods = list(dict.fromkeys(cell.method for cell in known))
    attacks = sorted(dict.fromkeys(cell.attack for cell in known), key=lambda a: a != "no attack")
    scale, digits = scale_of(metric)
    rows, levels = [], {}
    for y, method in enumerate(methods):
        found = [values.get((method, attack)) for attack in attacks]
        rows.append([method, *("-" if v is None else f"{scale * v:.{digits}f}" for v in found)])
        for x, value in enumerate(found, start=1):
            if value is not None and math.isfinite(value):
                part = (value - low) / (high - low) if high > low else 1.0
                levels[y, x] = round(_LEVELS * part)
    return TextTable(title, ["method", *attacks], rows, levels=levels)
