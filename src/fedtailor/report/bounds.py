"""The bound on the norms of uploads: it may change for the rounds that are left."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from .read import Run

# settings of ``cohort`` that bound the norms of uploads
BOUNDS = ("above_norm", "max_norm", "norm_factor", "norm_quantile")


def shown(value: Any) -> str:
    """Return a value as an experiment file has it."""
    return "none" if value is None else json.dumps(value)


def changed_bounds(old: Mapping[str, Any], new: Mapping[str, Any], number: int) -> list[str]:
    """Return a text for each of `BOUNDS` that has changed in round ``number``.

    Args:
        old: the settings before; empty before the first round.
        new: those from that round on.
        number: the round.

    >>> changed_bounds({"max_norm": None, "norm_factor": 100.0}, {"max_norm": 2.0}, 4)
    ['cohort.max_norm is 2.0 from round 4 on; it was none']
    """
    return [
        f"cohort.{name} is {shown(value)} from round {number} on; it was {shown(old[name])}"
        for name, value in new.items()
        if name in old and old[name] != value
    ]


def notes_on_bounds(run: Run) -> list[str]:
    """Return a note for each of `BOUNDS` that was not the same for all methods and rounds."""
    notes = []
    for name in BOUNDS:
        trials: dict[str, list[str]] = defaultdict(list)  # by the values in turn
        for trial in run.trials:
            values = (line.bounds[name] for line in trial.history if name in line.bounds)
            if turns := ", then ".join(dict.fromkeys(map(shown, values))):
                trials[turns].append(f"{trial.label}, seed {trial.seed}")
        if len(trials) > 1 or any(", then " in turns for turns in trials):
            each = "; ".join(f"{turns} ({'; '.join(of)})" for turns, of in trials.items())
            notes.append(f"Different bounds on updates in {run.path}: cohort.{name} was {each}")
    return notes
