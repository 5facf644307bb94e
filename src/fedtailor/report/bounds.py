"""The bound on the norms of uploads: it may change for the rounds that are left."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from .read import Trial

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


def notes_on_bounds(trials: Sequence[Trial]) -> list[str]:
    """Return a note for each setting with which some methods of a run were begun at another value
    than others, and for each that has changed later."""
    begun: dict[str, dict[str, dict[str, list[int]]]] = defaultdict(dict)
    changed = []
    for trial in trials:
        lines = [line for line in trial.history if line.bounds]
        for before, line in pairwise(lines):
            texts = changed_bounds(before.bounds, line.bounds, line.round)
            changed += [f"{trial.label}, seed {trial.seed}: {text}" for text in texts]
        for name, value in lines[0].bounds.items() if lines else ():
            seeds = begun[name].setdefault(shown(value), {}).setdefault(trial.label, [])
            seeds.append(trial.seed)
    return [
        f"Different bounds on updates: in round 1 cohort.{name} was {_by_value(by_value)}"
        for name, by_value in begun.items()
        if len(by_value) > 1
    ] + changed


def _by_value(labels: Mapping[str, Mapping[str, Sequence[int]]]) -> str:
    """Return text such as ``none (fedper, seed 0; fedavg, seeds 0 and 1) and 2.0 (local, ...)``."""
    return " and ".join(
        f"{value} ("
        + "; ".join(
            f"{label}, seed{'s' * (len(seeds) > 1)} {' and '.join(map(str, seeds))}"
            for label, seeds in by_label.items()
        )
        + ")"
        for value, by_label in labels.items()
    )
