"""Which round of a trial is reported: the best on validation data, for every model by itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import InputError, unknown
from ..objectives import DEFAULT  # noqa: F401
from ..objectives.objective import Objective
from .metrics import Metric, bare, best_round, summary
from .read import Run, Trial
from .records import EvaluationLine

_MEASURED = "the runs (evaluate.metrics names what is measured)"

Model = Literal["personal", "global", "novel"]


@dataclass(frozen=True)
class SelectedRound:
    """The reported round of one trial and model, and the evaluation on test data at that round."""

    round: int
    by_validation: bool  # False: there are no validation examples, and this is the last round
    test: EvaluationLine


def selection_metric(experiment: Mapping[str, Any], objective: Objective) -> Metric:
    """Return the metric by which the reported round is selected: ``evaluate.select``, or else
    that of the kind of task.

    >>> selection_metric({"evaluate": {"select": "auc"}}, DEFAULT), selection_metric({}, DEFAULT)
    ('auc', 'accuracy')
    """
    chosen: Metric | None = experiment.get("evaluate", {}).get("select")
    return chosen or objective.selects


def select_by(run: Run) -> Metric:
    """Return the metric by which the rounds of ``run`` are selected."""
    return selection_metric(run.experiment, run.objective)


def metric_of(runs: Sequence[Run], asked: Metric | None = None) -> Metric:
    """Return the measure that is shown: what is ``asked`` for, that by which all runs select their
    rounds, or else that of the kind of task. InputError where no run measures what is asked for."""
    if asked is not None:
        known = {"loss", *map(select_by, runs)}
        known |= {"accuracy" for run in runs if run.objective.has_hits}
        lines = (line for run in runs for trial in run.trials for line in trial.evaluations)
        known = known.union(*(line.metrics for line in lines))
        if asked not in known:
            raise unknown("metric", asked, known, where=_MEASURED, kind="they have")
        return asked
    metrics = {select_by(run) for run in runs}
    return metrics.pop() if len(metrics) == 1 else runs[0].objective.selects


def by_round(trial: Trial, model: Model, split: str) -> dict[int, EvaluationLine]:
    """Return by round the evaluations of ``model`` on ``split`` for which a client has examples."""
    return {
        evaluation.round: evaluation
        for evaluation in trial.evaluations
        if evaluation.model == model and evaluation.split == split and any(evaluation.num_examples)
    }


def validated(trial: Trial, model: Model, metric: Metric) -> tuple[int, EvaluationLine] | None:
    """Return the round with the best validation results of ``model``, and these results; where none
    is a number, the last evaluated round. None without any."""
    found = by_round(trial, model, "validation")
    if not found:
        return None
    means = {number: summary(one, metric).mean for number, one in found.items()}
    number = best_round(means, metric)
    return number, found[number]


def select_round(trial: Trial, model: Model, metric: Metric) -> SelectedRound | None:
    """Return the round with the best validation results, or else the last evaluated one, and its
    test results; None if the model was never evaluated."""
    chosen, test = validated(trial, model, metric), by_round(trial, model, "test")
    if chosen is None and not test:
        return None
    number = max(test) if chosen is None else chosen[0]
    if number not in test:
        raise InputError(
            f"{trial.folder / 'clients.jsonl'} has no test results of the {model} model at round "
            f"{number}, the best on validation; rounds with test results: {sorted(test)}"
        )
    by_validation = chosen is not None and not math.isnan(summary(chosen[1], metric).mean)
    return SelectedRound(number, by_validation, test[number])


def headline(trial: Trial, metric: Metric) -> str:
    """A trial's result in a few words, its personal models on the clients' own test examples: for
    example ``accuracy 42.6, worst client 20.0 (round 6)``; empty without such a result."""
    selected = select_round(trial, "personal", metric)
    if selected is None:
        return ""
    result = summary(selected.test, metric)
    mean, worst = (bare(metric, value) for value in (result.mean, result.worst))
    return f"{metric} {mean}, worst client {worst} (round {selected.round})"
