"""The results of a run that a report shows: methods over seeds, and test results at one round.

The round is selected on validation data, for every seed and model by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..errors import InputError
from .metrics import Summary, best_round, summarise
from .read import Evaluation, Run, Trial

Metric = Literal["accuracy", "loss"]
Model = Literal["personal", "global", "novel"]


@dataclass(frozen=True)
class Entry:
    """One method of one run, over its seeds. No two entries of a report have the same ``label``."""

    label: str
    run: Run
    method: str
    trials: Sequence[Trial]


@dataclass(frozen=True)
class SelectedRound:
    """The reported round of one trial and model, and the evaluation on test data at that round."""

    round: int
    by_validation: bool  # False: there are no validation examples, and this is the last round
    test: Evaluation


def entries(runs: Sequence[Run]) -> list[Entry]:
    """Return one entry a method, in the experiments' order.

    A label that occurs in two runs is followed by the run's name, or by its path if two runs have
    that name.
    """
    names = Counter(run.name for run in runs)
    labels = Counter(label for run in runs for label in {trial.label for trial in run.trials})
    entries = []
    for run in runs:
        tag = run.name if names[run.name] == 1 else str(run.path)
        for label in dict.fromkeys(trial.label for trial in run.trials):
            trials = [trial for trial in run.trials if trial.label == label]
            unique_label = f"{label} ({tag})" if labels[label] > 1 else label
            entries.append(Entry(unique_label, run, trials[0].method, trials))
    return entries


def goes_on(run: Run) -> bool:
    """Whether the run's methods went on from the models of another run."""
    return bool(run.experiment.get("start_from", {}).get("run"))


def metric_of(runs: Sequence[Run]) -> Metric:
    """Return the measure by which rounds are selected: accuracy, or loss for language models."""
    return "loss" if runs[0].is_language_modelling else "accuracy"


def summary(evaluation: Evaluation, metric: Metric) -> Summary:
    """Summarise ``evaluation`` over the clients that have examples.

    >>> e = Evaluation(3, "personal", "test", [0, 1], [4, 0], [0.5, None], [0.75, None])
    >>> summary(e, "accuracy").mean
    0.75
    """
    values = evaluation.accuracy if metric == "accuracy" else evaluation.loss
    return summarise(values, evaluation.num_examples, higher_is_better=metric == "accuracy")


def by_round(trial: Trial, model: Model, split: str) -> dict[int, Evaluation]:
    """Return by round the evaluations of ``model`` on ``split`` for which a client has examples."""
    return {
        evaluation.round: evaluation
        for evaluation in trial.evaluations
        if evaluation.model == model and evaluation.split == split and any(evaluation.num_examples)
    }


def select_round(trial: Trial, model: Model, metric: Metric) -> SelectedRound | None:
    """Select the round with the best validation results, and return its test results.

    Without validation examples the last evaluated round is selected.

    Returns:
        The round and its test results; None if the model was never evaluated.

    Raises:
        InputError: there are no test results at that round.
    """
    validation = by_round(trial, model, "validation")
    test = by_round(trial, model, "test")
    if validation:
        means = {number: summary(e, metric).mean for number, e in validation.items()}
        number = best_round(means, higher_is_better=metric == "accuracy")
    elif test:
        number = max(test)
    else:
        return None
    if number not in test:
        raise InputError(
            f"{trial.folder / 'clients.jsonl'} has no test results of the {model} model at round "
            f"{number}, the best on validation; rounds with test results: {sorted(test)}"
        )
    return SelectedRound(number, bool(validation), test[number])


def headline(trial: Trial, metric: Metric) -> str:
    """A trial's result in a few words: its personal models on the clients' own test examples.

    Returns:
        For example ``accuracy 42.6, worst client 20.0 (round 6)``; empty without such a result.
    """
    selected = select_round(trial, "personal", metric)
    if selected is None:
        return ""
    result = summary(selected.test, metric)
    factor, digits = (100, 1) if metric == "accuracy" else (1, 3)
    mean, worst = (f"{factor * value:.{digits}f}" for value in (result.mean, result.worst))
    return f"{metric} {mean}, worst client {worst} (round {selected.round})"
