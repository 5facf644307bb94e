"""Charts of FedSQ: rounds to the best result, and agreement of its masks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...store.metrics import Metric, higher_is_better, is_percentage, summary, unit_of
from ...store.read import Trial
from ...store.selection import by_round, metric_of
from ..select import Entry
from .content import Group, number
from .parts import Chart, Figure, line_chart
from .specs import best_so_far

Floats = NDArray[np.float64]


def _best_so_far(trial: Trial, metric: Metric) -> tuple[list[int], Floats]:
    """Return evaluated rounds, and the best mean validation result up to each of them."""
    evaluations = by_round(trial, "personal", "validation")
    rounds = sorted(evaluations)
    means = np.array([summary(evaluations[when], metric).mean for when in rounds])
    better = np.maximum if higher_is_better(metric) else np.minimum
    return rounds, better.accumulate(means) * (100 if is_percentage(metric) else 1)


def rounds_to_best(entries: Sequence[Entry], position: int, of: Sequence[Group]) -> Figure | None:
    """The best validation result so far, of all methods of the run."""
    entry = entries[position]
    metric = metric_of([entry.run])
    rows = []
    for place, other in enumerate(entries):
        if other.run.path != entry.run.path:
            continue
        for trial in other.trials:
            rounds, best = _best_so_far(trial, metric)
            first = int(np.argmax(best == best[-1])) if rounds else 0
            rows += [
                {"method": place, "seed": trial.seed, "round": when, "value": number(float(value)),
                 "isBest": k == first}
                for k, (when, value) in enumerate(zip(rounds, best.tolist(), strict=True))
            ]  # fmt: skip
    if not rows:
        return None
    title = f"best mean validation {metric} so far{unit_of(metric)}"
    labels = [one.label for one in entries]
    return Figure(
        f"Rounds to the best of {entry.label} and of the other methods",
        f"The best mean validation {metric} over clients that each method has reached by a round, "
        "a line for each seed. The marker is the first round with the best value of the whole run: "
        "the further left, the fewer rounds the method needs.",
        [Chart(best_so_far(labels, entry.label, title), {"lines": rows})],
    )


def by_activation(entries: Sequence[Entry], position: int, of: Sequence[Group]) -> Figure | None:
    """The agreement of each activation by round, over clients and seeds."""
    curves = _agreement(entries[position].trials)
    if not curves:
        return None
    rows = [
        {"series": k, "round": when, "value": number(100 * value)}
        for when, values in sorted(
            ({0: np.ones_like(next(iter(curves.values())))} | curves).items()
        )
        for k, value in enumerate(values.tolist())
    ]
    count = len(next(iter(curves.values())))
    named = np.unique(np.linspace(0, count - 1, min(count, 8)).round().astype(int)).tolist()
    colour = {
        "field": "series", "type": "quantitative",
        "scale": {"scheme": {"name": "viridis", "extent": [0.25, 0.85]}},
        "legend": {"orient": "top", "title": "activation, from the input up", "values": named,
                   "gradientLength": 160, "format": "d"},
    }  # fmt: skip
    spec = line_chart("units in agreement, mean over clients (%)", "activation", colour, least=None)
    return Figure(
        f"Mask agreement of {entries[position].label}",
        "By round, from 100 % at the start.",
        [Chart(spec, {"lines": rows})],
        beside_picture=True,
    )


def _agreement(trials: Sequence[Trial]) -> dict[int, Floats]:
    """Return by round the mean over clients and seeds, ``[activations]``."""
    seeds_by_round: dict[int, list[Floats]] = {}
    for trial in trials:
        for when, tensors in trial.diagnostics():
            if "client/agreement" in tensors:
                seeds_by_round.setdefault(when, []).append(tensors["client/agreement"].mean(0))
    return {when: np.mean(seeds, axis=0) for when, seeds in seeds_by_round.items()}
