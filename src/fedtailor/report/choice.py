"""The choice of a method by validation data. Test data play no part in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from .metrics import best_round, rounded
from .read import Trial
from .select import Entry, Metric, by_round, higher_is_better, select_by, summary


@dataclass(frozen=True)
class Score:
    """The mean validation result of a method's personal models over clients and seeds, each seed
    at its reported round; ``rounds`` are these, one a seed."""

    value: float
    rounds: tuple[int, ...]


def validation_score(
    entry: Entry, metric: Metric, seeds: Sequence[int] | None = None
) -> Score | None:
    """Return the validation score of a method, over ``seeds``, or else those of its experiment.

    None if training diverged with a seed, or one of the seeds has no validation results.
    """
    seeds = entry.run.experiment["seeds"] if seeds is None else seeds
    trials = {trial.seed: trial for trial in entry.trials if trial.commit.diverged is None}
    if not seeds or not all(seed in trials for seed in seeds):
        return None
    found = [reported_validation(trials[seed], select_by(entry.run), metric) for seed in seeds]
    values = [value for _, value in found]
    if any(math.isnan(value) for value in values):
        return None
    return Score(rounded(mean(values)), tuple(number for number, _ in found))


def reported_validation(trial: Trial, select: Metric, metric: Metric) -> tuple[int, float]:
    """The reported round, and the mean validation result there; not a number without any."""
    evaluations = by_round(trial, "personal", "validation")
    if not evaluations:
        return 0, math.nan
    means = {number: summary(one, select).mean for number, one in evaluations.items()}
    number = best_round(means, higher_is_better=higher_is_better(select))
    return number, summary(evaluations[number], metric).mean
