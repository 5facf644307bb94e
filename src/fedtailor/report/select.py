"""The results of runs that a report shows: methods over seeds, at their reported rounds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from ..store.metrics import Metric, higher_is_better, rounded, sizes_of, summary, values_of
from ..store.read import Run, Trial
from ..store.records import EvaluationLine
from ..store.selection import Model, SelectedRound, metric_of, select_by, select_round, validated


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


@dataclass(frozen=True)
class Choice:
    """The choice of a method by validation data.

    ``scores`` are the mean results of the methods' personal models by ``metric`` over clients and
    seeds, each seed at its reported round; ``left_out`` says why a method has none. ``seeds`` are
    those by which it is chosen; none: each run's own.
    """

    entries: Sequence[Entry]
    metric: Metric
    scores: Mapping[str, float]
    left_out: Mapping[str, str]
    seeds: Sequence[int]

    def best(self, method: str | None = None) -> Entry | None:
        """The entry with the best score, the first of equals, of ``method`` (None: of all)."""
        known = [one for one in self.entries if one.label in self.scores]
        of_method = [one for one in known if method in (None, one.method)]
        sign = 1 if higher_is_better(self.metric) else -1
        return max(of_method, key=lambda one: sign * self.scores[one.label], default=None)


def choose(members: Sequence[Entry]) -> Choice:
    """Choose by the seeds that all methods are through with, or else those that all runs have, or
    else each run's own."""
    metric = metric_of([entry.run for entry in members])
    of_runs = [set(entry.run.experiment["seeds"]) for entry in members]
    ended = [{trial.seed for trial in entry.trials if trial.commit.is_done} for entry in members]
    common = set[int].intersection(*of_runs)
    seeds = common.intersection(*ended) or common
    found = {
        one.label: _score(one, metric, sorted(seeds or one.run.experiment["seeds"]))
        for one in members
    }
    scores = {label: score for label, score in found.items() if isinstance(score, float)}
    left_out = {label: why for label, why in found.items() if isinstance(why, str)}
    return Choice(members, metric, scores, left_out, sorted(seeds))


def _score(entry: Entry, metric: Metric, seeds: Sequence[int]) -> float | str:
    """A method's mean validation result, or why it can't be chosen."""
    if diverged := [str(t.seed) for t in entry.trials if t.commit.diverged is not None]:
        return f"diverged with seed {', '.join(diverged)}"
    trials = {trial.seed: trial for trial in entry.trials}
    if missing := [str(seed) for seed in seeds if seed not in trials]:
        return f"lacks seed {', '.join(missing)}"
    found = [validated(trials[seed], "personal", select_by(entry.run)) for seed in seeds]
    if not all(found):
        return "has no validation results"
    value = rounded(mean(summary(one[1], metric).mean for one in found if one))
    return "has validation results that are not numbers" if math.isnan(value) else value


def not_begun(run: Run) -> dict[str, list[int]]:
    """The seeds with which a method has not begun, by its label; empty if all have."""
    begun = {(trial.label, trial.seed) for trial in run.trials}
    labels, seeds = [one["label"] for one in run.experiment["methods"]], run.experiment["seeds"]
    missing = {label: [seed for seed in seeds if (label, seed) not in begun] for label in labels}
    return {label: seeds for label, seeds in missing.items() if seeds}


def reported(entry: Entry, model: Model = "personal") -> list[tuple[Trial, SelectedRound]]:
    """Return the trials in which ``model`` was ever evaluated, each with its reported round."""
    found = ((trial, select_round(trial, model, select_by(entry.run))) for trial in entry.trials)
    return [(trial, one) for trial, one in found if one is not None]


def scores(evaluation: EvaluationLine, metric: Metric) -> list[tuple[int, float, int]]:
    """Return client, value of ``metric`` and number of examples, where there are all three."""
    values, sizes = values_of(evaluation, metric), sizes_of(evaluation, metric)
    of_clients = zip(evaluation.clients, values, sizes, strict=True)
    return [(client, value, n) for client, value, n in of_clients if n and value is not None]
