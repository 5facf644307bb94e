"""Live charts of FedSQ: rounds to the best result, and agreement of its masks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..methods import fedsq
from ..select import Entry, metric_of, unit_of
from .content import Group, number
from .parts import Chart, Figure, line_chart
from .specs import best_so_far


def rounds_to_best(entries: Sequence[Entry], position: int, of: Sequence[Group]) -> Figure | None:
    """The best validation result so far, of all methods of the run."""
    entry = entries[position]
    metric = metric_of([entry.run])
    rows = []
    for place, other in enumerate(entries):
        if other.run.path != entry.run.path:
            continue
        for trial in other.trials:
            rounds, best = fedsq.best_so_far(trial, metric)
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
        f"The best mean validation {metric} over clients that each method has reached by a round, "
        "a line for each seed. The marker is the first round with the best value of the whole run: "
        "the further left, the fewer rounds the method needs.",
        [Chart(best_so_far(labels, entry.label, title), {"lines": rows})],
    )


def by_activation(entries: Sequence[Entry], position: int, of: Sequence[Group]) -> Figure | None:
    """The agreement of each activation by round, over clients and seeds."""
    curves = fedsq.agreement(entries[position].trials)
    if not curves:
        return None
    rows = [
        {"series": k, "round": when, "value": number(100 * value)}
        for when, values in sorted(
            ({0: np.ones_like(next(iter(curves.values())))} | curves).items()
        )
        for k, value in enumerate(values.tolist())
    ]
    colour = {
        "field": "series", "type": "quantitative",
        "scale": {"scheme": {"name": "viridis", "extent": [0.25, 0.85]}},
        "legend": {"orient": "top", "title": "activation, from the input up", "tickMinStep": 1,
                   "gradientLength": 160, "format": "d"},
    }  # fmt: skip
    spec = line_chart("units in agreement, mean over clients (%)", "activation", colour, least=None)
    return Figure("By round, from 100 % at the start.", [Chart(spec, {"lines": rows})])
