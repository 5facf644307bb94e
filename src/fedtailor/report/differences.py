"""Differences of two methods, over pairs of a client and a seed that both have."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Literal

from .paired import paired
from .read import Run
from .select import (
    Entry,
    Metric,
    by_round,
    entries,
    higher_is_better,
    reported,
    scores,
)
from .untrained import unequal_turns, untrained_clients

FEWEST = 6  # pairs; if fewer of them all point one way, chance does that in more than 1 of 20 cases

Division = tuple[int, str, str]  # a seed, the data, and how they are divided
Reading = Literal["better", "worse", "may be chance", "trained unequally"]
Client = tuple[str, int | None]  # its name, and the seed if each seed has other clients


@dataclass(frozen=True)
class Difference:
    """How much better ``method`` is than ``over``, with a 95 % interval.

    Positive is better, of a loss, too. ``reading`` says what the interval allows to say: nothing
    where one of them is training alone, and its clients trained unequally often. Of
    ``num_clients`` clients ``num_worse_off`` do worse with ``method``. Where each seed divides the
    data anew, a client counts once a seed. ``trained`` is the same over the clients that had
    trained with both, where some had not (``num_untrained``); None if none had, too.
    """

    method: str
    over: str
    value: float
    low: float
    high: float
    num_clients: int
    num_seeds: int
    num_worse_off: int
    reading: Reading
    num_untrained: int = 0
    trained: Difference | None = None

    @property
    def has_interval(self) -> bool:
        """Whether there are enough clients for the interval to say anything."""
        return self.num_clients >= FEWEST

    @property
    def words(self) -> str:
        """What the data show, for a table."""
        if self.reading == "trained unequally":
            return self.reading
        if self.low == self.value == self.high == 0:
            return "equal"
        return self.reading if self.has_interval else "too few clients to tell"


def too_few(clients: int) -> str:
    """Begin a sentence on differences of fewer clients than can be told from chance.

    >>> too_few(1), too_few(5)
    ('1 client is too few to tell', '5 clients are too few to tell')
    """
    return f"{clients} client{' is' if clients == 1 else 's are'} too few to tell"


def comparable(runs: Sequence[Run]) -> list[list[Run]]:
    """Group runs that have clients in common: those that divide the same data alike with a seed."""
    groups: list[tuple[set[Division], list[Run]]] = []
    for run in runs:
        keys = {division_of(run, seed) for seed in run.partitions}
        joined = [group for group in groups if group[0] & keys]
        groups = [group for group in groups if not group[0] & keys]
        members = [one for _, of in joined for one in of]
        groups.append((keys.union(*(found for found, _ in joined)), [*members, run]))
    return [members for _, members in groups]


def comparable_entries(runs: Sequence[Run]) -> list[list[Entry]]:
    """Return the methods of the runs of each group of `comparable`."""
    of_all = entries(runs)
    return [
        [entry for entry in of_all if any(entry.run is run for run in group)]
        for group in comparable(runs)
    ]


def division_of(run: Run, seed: int) -> Division:
    """Return what a run's clients with a seed are told by."""
    partition = run.partitions[seed]
    return seed, partition.data, partition.digest


@dataclass(frozen=True)
class Results:
    """A method's results by client, for each division of the data; higher is better.

    ``has_names``: a client of one name is the same one with every seed. ``untrained`` are clients
    that had not trained. ``is_fair``: it is not training alone with clients that trained
    unequally often.
    """

    label: str
    scores: Mapping[Division, Mapping[str, float]]
    has_names: bool
    untrained: Mapping[Division, frozenset[str]]
    is_fair: bool

    def without(self, other: Results) -> Results:
        """Without the clients that had not trained here, or in ``other``."""
        left_out = {
            division: self.untrained[division] | other.untrained.get(division, frozenset())
            for division in self.scores
        }
        kept = {
            division: {k: v for k, v in of.items() if k not in left_out[division]}
            for division, of in self.scores.items()
        }
        return replace(self, scores=kept, untrained=dict.fromkeys(kept, frozenset()))


def results_of(
    entry: Entry, metric: Metric, split: Literal["test", "validation"] = "test"
) -> Results:
    """Return the results of a method's personal models at the reported rounds, on test data or on
    validation data."""
    sign = 1 if higher_is_better(metric) else -1
    by_division = {}
    untrained = {}
    for trial, selected in reported(entry):
        found = by_round(trial, "personal", split).get(selected.round)
        if found is None:
            continue
        partition = entry.run.partitions[trial.seed]
        division = division_of(entry.run, trial.seed)
        never = untrained_clients(entry.run, trial, selected.round, found)
        untrained[division] = frozenset(map(partition.name, never))
        by_division[division] = {
            partition.name(client): sign * value
            for client, value, _ in scores(found, metric)
            if math.isfinite(value)
        }
    has_names = all(part.names is not None for part in entry.run.partitions.values())
    return Results(entry.label, by_division, has_names, untrained, unequal_turns(entry) is None)


def by_client(ours: Results, theirs: Results) -> dict[Client, float]:
    """Return the differences by client; where it is the same one with every seed, their mean."""
    found: dict[Client, list[float]] = {}
    same = ours.has_names and theirs.has_names
    for division in (one for one in ours.scores if one in theirs.scores):
        others = theirs.scores[division]
        for client, value in ours.scores[division].items():
            if client in others:
                key = (client, None if same else division[0])
                found.setdefault(key, []).append(value - others[client])
    return {key: round(mean(values), 12) for key, values in found.items()}


def difference(ours: Results, theirs: Results) -> Difference | None:
    """Return how much better one method is than another; None if they have no client in common."""
    clients = by_client(ours, theirs)
    if not clients:
        return None
    both = [division for division in ours.scores if division in theirs.scores]
    result = paired(
        [ours.scores[division] for division in both],
        [theirs.scores[division] for division in both],
        same_clients=ours.has_names and theirs.has_names,
    )
    reading: Reading = "may be chance"
    if not (ours.is_fair and theirs.is_fair):
        reading = "trained unequally"
    elif len(clients) >= FEWEST and (result.low > 0 or result.high < 0):
        reading = "better" if result.low > 0 else "worse"
    trained, missing = None, 0
    if any(one.untrained.get(division) for one in (ours, theirs) for division in both):
        trained = difference(ours.without(theirs), theirs.without(ours))
        missing = len(clients) - (trained.num_clients if trained else 0)
    return Difference(
        method=ours.label,
        over=theirs.label,
        value=result.difference,
        low=result.low,
        high=result.high,
        num_clients=len(clients),
        num_seeds=result.num_seeds,
        num_worse_off=sum(value < 0 for value in clients.values()),
        reading=reading,
        num_untrained=missing,
        trained=trained if missing else None,
    )


def of_intervals(differences: Sequence[Difference]) -> str:
    """The end of a sentence on differences from training alone: what their intervals say."""
    if not any(one.has_interval for one in differences):
        clients = max(one.num_clients for one in differences)
        return f". {too_few(clients)} which lead or loss is chance."
    return (
        ", with its 95 % interval over clients and seeds. A lead or a loss whose interval "
        "contains 0 may be chance."
    )
