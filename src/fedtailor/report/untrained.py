"""Clients that had not trained by the reported round, where a part of a model is a client's own,
kept by itself or as a row at the server: theirs is as it began, so their results stand apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from ..store.metrics import Metric, bare, is_percentage
from ..store.read import Run, Trial
from ..store.records import EvaluationLine
from .select import Entry, goes_on, reported, scores

ALONE = "local"  # the method that trains without a federation


@dataclass(frozen=True)
class Untrained:
    """How many of the ``clients`` with test results had not trained, both summed over ``seeds``;
    their mean result, and that of the others (None: there are none)."""

    count: int
    clients: int
    seeds: int
    mean: float
    others: float | None

    @property
    def share(self) -> str:
        """Such as ``26 of 40 clients``."""
        seeds = f" of {self.seeds} seeds" if self.seeds > 1 else ""
        return f"{self.count} of {self.clients} clients{seeds}"

    def words(self, metric: Metric) -> str:
        """Say it after the method's name.

        >>> Untrained(26, 40, 1, 0.385, 0.714).words("accuracy")
        '26 of 40 clients never trained: accuracy 38.5 %, the others 71.4 %'
        """
        unit = " %" if is_percentage(metric) else ""
        text = f"{self.share} never trained: {metric} {bare(metric, self.mean)}{unit}"
        others = f", the others {bare(metric, self.others)}{unit}"
        return text if self.others is None else text + others


def num_trainings(trial: Trial, number: int) -> Counter[int]:
    """How often each client has trained by round ``number``, so that its private part was kept."""
    found = Counter[int]()
    for one in trial.history:
        if one.round <= number:
            found.update([*one.cohort, *one.dropped_after, *one.late])
    return found


def untrained_clients(run: Run, trial: Trial, number: int, evaluation: EvaluationLine) -> set[int]:
    """The evaluated clients that had not trained by round ``number``; empty where no part of a
    model is a client's own, or where the models went on from another run."""
    costs = trial.costs
    if goes_on(run) or costs is None or not (costs.private or costs.has_row):
        return set()
    return set(evaluation.clients) - num_trainings(trial, number).keys()


def untrained_of(entry: Entry, metric: Metric) -> Untrained | None:
    """The clients of a method that had not trained by its reported rounds; None if all had."""
    never, others = list[float](), list[float]()
    for trial, one in reported(entry):
        untrained = untrained_clients(entry.run, trial, one.round, one.test)
        for client, value, _ in scores(one.test, metric):
            (never if client in untrained else others).append(value)
    if not never:
        return None
    clients = len(never) + len(others)
    seeds = len(entry.trials)
    return Untrained(len(never), clients, seeds, mean(never), mean(others) if others else None)


def unequal_turns(entry: Entry) -> str | None:
    """Say how often the clients of training alone trained, if that makes it an unfair measure."""
    if entry.method != ALONE:
        return None
    for trial, one in reported(entry):
        found = num_trainings(trial, one.round)
        counts = [found[client] for client in one.test.clients]
        low, high = min(counts, default=0), max(counts, default=0)
        if high - low > 1 or low == 0 < high:
            return (
                f"{entry.label} is no fair measure of training alone: its clients trained {low} to "
                f"{high} times each"
            )
    return None


def untrained_notes(entries: Sequence[Entry], metric: Metric) -> list[str]:
    """Return notes on methods with clients that had not trained, or had trained unequally."""
    notes = list[str]()
    for entry in entries:
        if (found := untrained_of(entry, metric)) is not None:
            notes.append(f"{entry.label}: {found.words(metric)}")
        if (turns := unequal_turns(entry)) is not None:
            notes.append(turns)
    return notes
