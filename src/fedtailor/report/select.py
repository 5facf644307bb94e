"""The results of runs that a report shows: methods over seeds, at their reported rounds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from ..store.metrics import Metric, rounded, sizes_of, summary, values_of
from ..store.read import Run, Trial
from ..store.records import EvaluationLine
from ..store.selection import Model, SelectedRound, by_round, select_by, select_round, validated


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


def own_metrics(trials: Sequence[Trial]) -> list[Metric]:
    """Return the names of the metrics that the trials have beside loss and accuracy."""
    lines = (evaluation for trial in trials for evaluation in trial.evaluations[:1])
    return list(dict.fromkeys(name for line in lines for name in line.metrics))


class ValidationScore(NamedTuple):
    """The mean validation result of a method's personal models over clients and seeds, each seed at
    its reported round; ``rounds`` are these, one a seed."""

    value: float
    rounds: tuple[int, ...]


def validation_score(
    entry: Entry, metric: Metric, seeds: Sequence[int] | None = None
) -> ValidationScore | None:
    """Return the score that chooses a method, over ``seeds``, or else those of its experiment; None
    if training diverged with a seed, or one has no validation results."""
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


def scores(evaluation: EvaluationLine, metric: Metric) -> list[tuple[int, float, int]]:
    """Return client, value of ``metric`` and number of examples, where there are all three."""
    values, sizes = values_of(evaluation, metric), sizes_of(evaluation, metric)
    of_clients = zip(evaluation.clients, values, sizes, strict=True)
    return [(client, value, n) for client, value, n in of_clients if n and value is not None]


def is_one_model(trial: Trial, metric: Metric) -> bool:
    """Whether all clients use the global model: their models have its results, to the last digit.
    False where that was not evaluated."""
    selected = select_round(trial, "personal", metric)
    found = by_round(trial, "global", "test").get(selected.round) if selected else None
    return selected is not None and found is not None and found.loss == selected.test.loss
