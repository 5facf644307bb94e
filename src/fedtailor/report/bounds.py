"""The bound on the norms of uploads: it may change for the rounds that are left."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from .read import Run, Trial

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
    """Return a note for each setting with which some methods of a run were begun at another value
    than others, and for each that has changed later."""
    begun: dict[str, dict[str, list[Trial]]] = defaultdict(lambda: defaultdict(list))
    changed: dict[str, list[Trial]] = defaultdict(list)
    for trial in run.trials:
        lines = [line for line in trial.history if line.bounds]
        for before, line in pairwise(lines):
            for text in changed_bounds(before.bounds, line.bounds, line.round):
                changed[text].append(trial)
        for name, value in lines[0].bounds.items() if lines else ():
            begun[name][shown(value)].append(trial)
    different = [
        f"Different bounds on updates in {run.path}: in round 1 cohort.{name} was "
        + " and ".join(f"{value} ({_names(group)})" for value, group in by_value.items())
        for name, by_value in begun.items()
        if len(by_value) > 1
    ]
    later = [f"{text}: {_names(group)} ({run.path})" for text, group in changed.items()]
    return [*different, *later]


def _names(trials: Sequence[Trial]) -> str:
    """Return the methods, each with its seeds: ``fedper, seed 0; fedavg, seeds 0, 1, 2``."""
    seeds: dict[str, list[str]] = defaultdict(list)
    for trial in trials:
        seeds[trial.label].append(str(trial.seed))
    return "; ".join(
        f"{label}, seed{'s' * (len(some) > 1)} {', '.join(some)}" for label, some in seeds.items()
    )
