"""Results under simulated attacks as maps: methods by attacks, one map a model and measure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

from ..store.metrics import ATTACK_SUCCESS, Metric, scale_of, unit_of
from ..store.read import attack_of
from ..units import fixed
from .names import NO_ATTACK, attack_name
from .rows import ModelResult, Row
from .select import Entry
from .table import Table
from .text import TextTable

_APART = {"attack", "engine", "format", "methods", "name", "seeds"}
_LEVELS = 45  # percent of the colour of the largest value, on which text can still be read
_MODELS = {"Personal models": "personal_model", "Global models": "global_model"}

Places = Mapping[tuple[str, str], Sequence[Row]]  # by method and attack


def attack_maps(entries: Sequence[Entry], comparison: Table) -> list[TextTable]:
    """Return a map of the methods' results by attack, for each model; none without attacks.

    ``entries`` are those behind the comparison's rows. Methods of several runs share a row where
    their settings differ in the attack alone.
    """
    attacks = [attack_name(attack_of(entry.run.experiment)) for entry in entries]
    if all(name == NO_ATTACK for name in attacks):
        return []
    settings = [_settings(entry) for entry in entries]
    firsts = dict(zip(settings[::-1], entries[::-1], strict=True))
    labels = [entry.trials[0].label for entry in firsts.values()]
    places: dict[tuple[str, str], list[Row]] = {}
    for one, attack, row in zip(settings, attacks, comparison.rows, strict=True):
        label = firsts[one].trials[0].label
        name = f"{label} ({firsts[one].run_name})" if labels.count(label) > 1 else label
        places.setdefault((name, attack), []).append(row)
    shown: Mapping[Metric, str] = {comparison.metric: comparison.metric}
    return [
        _map(f"{title}: test {what}{unit_of(metric)}", values, metric)
        for metric, what in {**shown, ATTACK_SUCCESS: "attack success"}.items()
        for title, model in _MODELS.items()
        if (values := _means(places, model, metric, comparison.metric))
    ]


def _settings(entry: Entry) -> str:
    """All that a method's result depends on, but for the attack and the seeds."""
    experiment = {k: v for k, v in entry.run.experiment.items() if k not in _APART}
    methods = entry.run.experiment["methods"]
    own = next(method for method in methods if method["label"] == entry.trials[0].label)
    return json.dumps([experiment, own], sort_keys=True)


def _means(
    places: Places, model: str, metric: Metric, shown: Metric
) -> dict[tuple[str, str], float]:
    """The means over all seeds of the runs in one place."""
    found = {}
    for place, rows in places.items():
        values = []
        for row in rows:
            result: ModelResult | None = getattr(row, model)
            if result is not None:
                spread = result.mean if metric == shown else result.metrics.get(metric)
                values += [spread.mean] * len(row.seeds) if spread else []
        if values:
            found[place] = sum(values) / len(values)
    return found


def _map(title: str, values: Mapping[tuple[str, str], float], metric: Metric) -> TextTable:
    finite = [value for value in values.values() if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    methods = list(dict.fromkeys(method for method, _ in values))
    attacks = sorted(dict.fromkeys(attack for _, attack in values), key=lambda a: a != NO_ATTACK)
    scale, digits = scale_of(metric)
    rows, levels = [], {}
    for y, method in enumerate(methods):
        found = [values.get((method, attack)) for attack in attacks]
        rows.append([method, *("-" if v is None else fixed(scale * v, digits) for v in found)])
        for x, value in enumerate(found, start=1):
            if value is not None and math.isfinite(value):
                part = (value - low) / (high - low) if high > low else 1.0
                levels[y, x] = round(_LEVELS * part)
    return TextTable(title, ["method", *attacks], rows, levels=levels)
