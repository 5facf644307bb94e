"""The results of a run that a report shows: methods over seeds, and test results at one round.

The round is selected on validation data, for every seed and model by itself.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Literal, NamedTuple, Protocol

from ..errors import InputError, unknown
from ..objectives import DEFAULT, OBJECTIVES  # noqa: F401
from ..objectives.objective import Objective
from .metrics import Summary, best_round, rounded, summarise
from .read import Run, Trial
from .records import Evaluation

Metric = str  # accuracy, loss, or the name of one of the experiment's own metrics
ATTACK_SUCCESS = "attack_success"  # of a backdoor: a run with one has it as a metric
_LOWER = frozenset({"loss", ATTACK_SUCCESS}).union(*(one.errors for one in OBJECTIVES.values()))
_SHARES = frozenset({"accuracy", ATTACK_SUCCESS}).union(*(o.shares for o in OBJECTIVES.values()))
Model = Literal["personal", "global", "novel"]


class ClientResults(Protocol):
    """The results of clients, one entry each; what is undefined is None."""

    @property
    def num_examples(self) -> Sequence[int]: ...
    @property
    def loss(self) -> Sequence[float | None]: ...
    @property
    def accuracy(self) -> Sequence[float | None]: ...
    @property
    def metrics(self) -> Mapping[str, Sequence[float | None]]: ...


@dataclass(frozen=True)
class Entry:
    """One method of one run, over its seeds. No two entries of a report have the same ``label``.

    ``run_name`` is the run's name, or the end of its path that tells it from other runs of the
    report with that name."""

    label: str
    run: Run
    run_name: str
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

    A label that occurs in two runs is followed by the run's name, or by the end of its path if two
    runs have that name.
    """
    labels = Counter(label for run in runs for label in {trial.label for trial in run.trials})
    entries = []
    for run in runs:
        namesakes = [other.path for other in runs if other is not run and other.name == run.name]
        tag = path_end(run.path, namesakes) if namesakes else run.name
        for label in dict.fromkeys(trial.label for trial in run.trials):
            trials = [trial for trial in run.trials if trial.label == label]
            unique_label = f"{label} ({tag})" if labels[label] > 1 else label
            entries.append(Entry(unique_label, run, tag, trials[0].method, trials))
    return entries


def path_end(path: Path, others: Sequence[Path]) -> str:
    """Return as many last parts of ``path`` as tell it from ``others``.

    >>> path_end(Path("runs/spring/map"), [Path("runs/autumn/map"), Path("runs/spring/other")])
    'spring/map'
    """
    parts = path.absolute().parts
    for count in range(1, len(parts)):
        end = parts[-count:]
        if all(other.absolute().parts[-count:] != end for other in others):
            return "/".join(end)
    return str(path)


def goes_on(run: Run) -> bool:
    """Whether the run's methods went on from the models of another run."""
    return bool(run.experiment.get("start_from", {}).get("run"))


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


def metric_of(runs: Sequence[Run]) -> Metric:
    """Return the measure that is shown: that by which all runs select their rounds, or else
    that of the kind of task."""
    metrics = {select_by(run) for run in runs}
    return metrics.pop() if len(metrics) == 1 else runs[0].objective.selects


def own_metrics(trials: Sequence[Trial]) -> list[Metric]:
    """Return the names of the metrics that the trials have beside loss and accuracy."""
    lines = (evaluation for trial in trials for evaluation in trial.evaluations[:1])
    return list(dict.fromkeys(name for line in lines for name in line.metrics))


def higher_is_better(metric: Metric) -> bool:
    """Return whether higher values of ``metric`` are better: not of a loss, an error, or the
    success of an attack."""
    return metric not in _LOWER


def is_percentage(metric: Metric) -> bool:
    """Return whether ``metric`` is shown in percent."""
    return metric in _SHARES


def unit_of(metric: Metric) -> str:
    """Return the unit of ``metric``, in brackets after a space; empty if it has none.

    >>> unit_of("accuracy"), unit_of("brier")
    (' (%)', '')
    """
    return " (%)" if is_percentage(metric) else " (nats)" if metric == "loss" else ""


def values_of(evaluation: ClientResults, metric: Metric) -> Sequence[float | None]:
    """Return the clients' values of ``metric``; None where it is undefined.

    Raises:
        InputError: the run has no such metric.
    """
    if metric in ("accuracy", "loss"):
        return evaluation.accuracy if metric == "accuracy" else evaluation.loss
    if metric not in evaluation.metrics:
        allowed = ["accuracy", "loss", *evaluation.metrics]
        raise unknown(
            "metric",
            metric,
            allowed,
            where="the run (evaluate.metrics names what is measured)",
            kind="it has",
        )
    return evaluation.metrics[metric]


def sizes_of(evaluation: ClientResults, metric: Metric) -> list[int]:
    """Return the clients' numbers of examples; 0 where one of the experiment's own metrics is
    undefined."""
    values = values_of(evaluation, metric)
    if metric in ("accuracy", "loss"):
        return list(evaluation.num_examples)
    pairs = zip(values, evaluation.num_examples, strict=True)
    return [0 if value is None else count for value, count in pairs]


def summary(evaluation: ClientResults, metric: Metric) -> Summary:
    """Summarise ``evaluation`` over the clients that have examples, and for which ``metric`` is
    defined; NaN where it is for none of them.

    Raises:
        InputError: the run has no such metric, or no client has examples.

    >>> e = Evaluation(3, "personal", "test", [0, 1], [4, 0], [0.5, None], [0.75, None])
    >>> summary(e, "accuracy").mean
    0.75
    """
    values, sizes = values_of(evaluation, metric), sizes_of(evaluation, metric)
    if any(evaluation.num_examples) and not any(sizes):
        nan = math.nan
        return Summary(nan, nan, nan, nan, nan, clients=0, without_examples=len(sizes))
    return summarise(values, sizes, higher_is_better=higher_is_better(metric))


def by_round(trial: Trial, model: Model, split: str) -> dict[int, Evaluation]:
    """Return by round the evaluations of ``model`` on ``split`` for which a client has examples."""
    return {
        evaluation.round: evaluation
        for evaluation in trial.evaluations
        if evaluation.model == model and evaluation.split == split and any(evaluation.num_examples)
    }


def validated(trial: Trial, model: Model, metric: Metric) -> tuple[int, Evaluation] | None:
    """Return the round with the best validation results of ``model``, and these results; where none
    is a number, the last evaluated round. None without any."""
    found = by_round(trial, model, "validation")
    if not found:
        return None
    means = {number: summary(one, metric).mean for number, one in found.items()}
    number = best_round(means, higher_is_better=higher_is_better(metric))
    return number, found[number]


def select_round(trial: Trial, model: Model, metric: Metric) -> SelectedRound | None:
    """Select the round with the best validation results, or else the last evaluated one, and return
    its test results.

    Returns:
        The round and its test results; None if the model was never evaluated.

    Raises:
        InputError: there are no test results at that round.
    """
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


class ValidationScore(NamedTuple):
    """The mean validation result of a method's personal models over clients and seeds, each seed at
    its reported round; ``rounds`` are these, one a seed."""

    value: float
    rounds: tuple[int, ...]


def validation_score(
    entry: Entry, metric: Metric, seeds: Sequence[int] | None = None
) -> ValidationScore | None:
    """Return the score that chooses a method, over ``seeds``, or else those of its experiment.

    None if training diverged with a seed, or one of the seeds has no validation results.
    """
    trials = {trial.seed: trial for trial in entry.trials if trial.commit.diverged is None}
    seeds = entry.run.experiment["seeds"] if seeds is None else seeds
    found = [
        validated(trials[seed], "personal", select_by(entry.run)) if seed in trials else None
        for seed in seeds
    ]
    known = [one for one in found if one is not None]
    value = rounded(mean(summary(one, metric).mean for _, one in known)) if known else math.nan
    if len(known) < len(found) or math.isnan(value):
        return None
    return ValidationScore(value, tuple(number for number, _ in known))


def reported(entry: Entry, model: Model = "personal") -> list[tuple[Trial, SelectedRound]]:
    """Return a method's trials, each with the reported round of ``model``; without those in which
    it was never evaluated."""
    found = ((trial, select_round(trial, model, select_by(entry.run))) for trial in entry.trials)
    return [(trial, one) for trial, one in found if one is not None]


def scores(evaluation: Evaluation, metric: Metric) -> list[tuple[int, float, int]]:
    """Return client, value of ``metric`` and number of examples, where there are all three."""
    values, sizes = values_of(evaluation, metric), sizes_of(evaluation, metric)
    of_clients = zip(evaluation.clients, values, sizes, strict=True)
    return [(client, value, n) for client, value, n in of_clients if n and value is not None]


def is_one_model(trial: Trial, metric: Metric) -> bool:
    """Whether all clients use the global model: their models have its results, to the last digit.

    False where the global model was not evaluated.
    """
    selected = select_round(trial, "personal", metric)
    found = by_round(trial, "global", "test").get(selected.round) if selected else None
    return selected is not None and found is not None and found.loss == selected.test.loss


def headline(trial: Trial, metric: Metric) -> str:
    """A trial's result in a few words: its personal models on the clients' own test examples.

    Returns:
        For example ``accuracy 42.6, worst client 20.0 (round 6)``; empty without such a result.
    """
    selected = select_round(trial, "personal", metric)
    if selected is None:
        return ""
    result = summary(selected.test, metric)
    factor, digits = (100, 1) if is_percentage(metric) else (1, 3)
    mean, worst = (f"{factor * value:.{digits}f}" for value in (result.mean, result.worst))
    return f"{metric} {mean}, worst client {worst} (round {selected.round})"
