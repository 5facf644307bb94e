"""Paired differences of two methods, over the clients and seeds that both have."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..store.metrics import Metric, bare, higher_is_better, is_percentage, sizes_of
from ..store.read import Run
from .select import Entry, entries, reported, scores
from .text import TextTable
from .untrained import unequal_turns, untrained_clients

FEWEST = 6  # pairs; if fewer of them all point one way, chance does that in more than 1 of 20 cases
_MANY = 1000  # clients; a sample's mean of more of them is drawn from a normal distribution
_BLOCK = 4_000_000  # weights in memory at once

Floats = NDArray[np.float64]
Division = tuple[int, str, str]  # a seed, the data, and how they are divided
Reading = Literal[
    "better", "worse", "may be chance", "trained unequally", "some results are no numbers"
]
Client = tuple[str, int | None]  # its name, and the seed if each seed has other clients
ByClient = Mapping[str, float]


@dataclass(frozen=True)
class Difference:
    """How much better ``method`` is than ``over``, with a 95 % interval.

    Positive is better, of a loss, too. ``reading`` says what the interval allows to say: nothing
    where one of them is training alone, and its clients trained unequally often, or where a model
    has diverged: that client is left out. Of ``num_clients`` clients ``num_worse_off`` do worse
    with ``method``. Where each seed divides the data anew, a client counts once a seed. ``trained``
    is the same over the clients that had trained with both, where some had not
    (``num_untrained``); None if none had, too.
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
        if self.reading in ("trained unequally", "some results are no numbers"):
            return self.reading
        if self.low == self.value == self.high == 0:
            return "equal"
        return self.reading if self.has_interval else "too few clients to tell"

    def of_trained(self, metric: Metric) -> str:
        """Say what is left of it over clients that have trained with both; empty if all have."""
        if not self.num_untrained:
            return ""
        if (one := self.trained) is None:
            return f"No client has trained with both {self.method} and {self.over}"
        interval = f" ({one.interval(metric)})" if one.has_interval else ""
        return (
            f"{self.num_untrained} of {self.num_clients} clients have not trained with both "
            f"{self.method} and {self.over}; over the others {self.method} is ahead by "
            f"{bare(metric, one.value, signed=True)}{interval}"
        )

    def interval(self, metric: Metric) -> str:
        """Such as ``-1.2 to +3.4``; ``-`` where there is none."""
        ends = (bare(metric, end, signed=True) for end in (self.low, self.high))
        return " to ".join(ends) if self.has_interval else "-"


def division_of(run: Run, seed: int) -> Division:
    """Return what a run's clients with a seed are told by."""
    partition = run.partitions[seed]
    return seed, partition.data, partition.digest


def comparable_entries(runs: Sequence[Run]) -> list[list[Entry]]:
    """Group the methods of runs that have clients in common: those that divide the same data alike
    with a seed."""
    groups: list[tuple[set[Division], list[Run]]] = []
    for run in runs:
        divisions, members = {division_of(run, seed) for seed in run.partitions}, [run]
        for group in [group for group in groups if group[0] & divisions]:
            groups.remove(group)
            divisions, members = divisions | group[0], [*group[1], *members]
        groups.append((divisions, members))
    of_all = entries(runs)
    return [
        [entry for entry in of_all if any(entry.run is run for run in members)]
        for _, members in groups
    ]


@dataclass(frozen=True)
class MethodResults:
    """A method's results on test data by client, for each division of the data; higher is better.

    ``has_names``: a client of one name is the same one with every seed. ``untrained`` are clients
    that had not trained. ``is_fair``: it is not training alone with clients that trained
    unequally often. ``lost``: how many clients have results that are no numbers.
    """

    label: str
    by_division: Mapping[Division, ByClient]
    lost: Mapping[Division, int]
    has_names: bool
    untrained: Mapping[Division, Collection[str]]
    is_fair: bool

    @classmethod
    def of_all(
        cls, members: Sequence[Entry], metric: Metric, seeds: Sequence[int]
    ) -> dict[str, MethodResults]:
        """Return those of several methods by label: of the personal models at the reported rounds,
        with these ``seeds`` (none: all)."""
        return {one.label: cls._of(one, metric, seeds) for one in members}

    @staticmethod
    def _of(entry: Entry, metric: Metric, seeds: Sequence[int]) -> MethodResults:
        sign = 1 if higher_is_better(metric) else -1
        found, untrained = dict[Division, ByClient](), dict[Division, Collection[str]]()
        lost = dict[Division, int]()
        for trial, selected in reported(entry):
            if seeds and trial.seed not in seeds:
                continue
            test, name = selected.test, entry.run.partitions[trial.seed].name
            division = division_of(entry.run, trial.seed)
            never = untrained_clients(entry.run, trial, selected.round, test)
            untrained[division] = {*map(name, never)}
            found[division] = {
                name(client): sign * value
                for client, value, _ in scores(test, metric)
                if math.isfinite(value)
            }
            lost[division] = sum(map(bool, sizes_of(test, metric))) - len(found[division])
        has_names = all(part.names is not None for part in entry.run.partitions.values())
        is_fair = unequal_turns(entry) is None
        return MethodResults(entry.label, found, lost, has_names, untrained, is_fair)

    def _shared(self, other: MethodResults) -> list[Division]:
        return [division for division in self.by_division if division in other.by_division]

    def _minus(
        self, other: MethodResults, *, trained: bool = False
    ) -> dict[Division, dict[str, float]]:
        """Return the differences by division and client, of those that both methods have;
        ``trained``: of those that have trained with both."""
        found = {}
        for division in self._shared(other):
            ours, theirs = self.by_division[division], other.by_division[division]
            never = {*self.untrained[division], *other.untrained[division]} if trained else ()
            both = [client for client in ours if client in theirs and client not in never]
            found[division] = {client: ours[client] - theirs[client] for client in both}
        return {division: by_client for division, by_client in found.items() if by_client}

    def by_client(self, other: MethodResults, *, trained: bool = False) -> dict[Client, float]:
        """Return the differences by client; of one that is the same with every seed, their mean."""
        found: dict[Client, list[float]] = {}
        for (seed, *_), differences in self._minus(other, trained=trained).items():
            for client, value in differences.items():
                key = (client, None if self.has_names and other.has_names else seed)
                found.setdefault(key, []).append(value)
        return {key: round(mean(values), 12) for key, values in found.items()}

    def ahead(self, other: MethodResults, *, trained: bool = False) -> Difference | None:
        """Return how much better it is than another one; None if they have no client in common."""
        differences = [*self._minus(other, trained=trained).values()]
        if not differences:
            return None
        clients = self.by_client(other, trained=trained)
        low, high = interval_of(differences, same_clients=self.has_names and other.has_names)
        reading: Reading = "may be chance"
        if any(one.lost[division] for one in (self, other) for division in self._shared(other)):
            reading = "some results are no numbers"
        elif not (self.is_fair and other.is_fair):
            reading = "trained unequally"
        elif len(clients) >= FEWEST and (low > 0 or high < 0):
            reading = "better" if low > 0 else "worse"
        missing = 0 if trained else len(clients) - len(self.by_client(other, trained=True))
        return Difference(
            method=self.label,
            over=other.label,
            value=float(np.mean([np.mean([*of.values()]) for of in differences])),
            low=low,
            high=high,
            num_clients=len(clients),
            num_seeds=len(differences),
            num_worse_off=sum(value < 0 for value in clients.values()),
            reading=reading,
            num_untrained=missing,
            trained=self.ahead(other, trained=True) if missing else None,
        )


def interval_of(
    differences: Sequence[Mapping[str, float]],
    *,
    same_clients: bool = False,
    draws: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """Return the ends of the 95 % interval by a hierarchical bootstrap: seeds are drawn with
    replacement, then clients within each of them. A seed divides the data anew, so its clients are
    its own.

    With one seed the interval speaks of clients alone, and with three it says little of seeds.
    ``differences`` are by client for each seed, at least one. With ``same_clients``, where a client
    of that name is the same one with every seed, clients are drawn once for all seeds.
    """
    sample = _crossed if same_clients else _nested
    drawn = sample(differences, draws, np.random.default_rng(seed))
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(low), float(high)


def _nested(
    differences: Sequence[Mapping[str, float]], draws: int, rng: np.random.Generator
) -> Floats:
    """Means ``[draws]`` over seeds that are drawn, each with its own draw of its clients."""
    values, s = [np.array(list(d.values())) for d in differences], len(differences)
    # row i, seed j: what the i-th drawn seed has in each draw, if it is seed j
    means = np.array([[_means(d, draws, rng) for d in values] for _ in range(s)])
    drawn = rng.integers(s, size=(s, draws))
    rows, columns = np.arange(s)[:, None], np.arange(draws)[None, :]
    return np.asarray(means[rows, drawn, columns].mean(axis=0))


def _means(values: Floats, draws: int, rng: np.random.Generator) -> Floats:
    n = len(values)
    if n > _MANY:
        return np.asarray(rng.normal(values.mean(), values.std() / np.sqrt(n), draws))
    drawn = rng.integers(n, size=(draws, n))
    return np.asarray(values[drawn].mean(axis=1))


def _crossed(
    differences: Sequence[Mapping[str, float]], draws: int, rng: np.random.Generator
) -> Floats:
    """Means ``[draws]`` over seeds that are drawn, with one draw of clients for all of them."""
    clients = list(dict.fromkeys(client for d in differences for client in d))
    n, s = len(clients), len(differences)
    x = np.array([[d.get(client, np.nan) for client in clients] for d in differences])  # [s, n]
    has = ~np.isnan(x)
    overall = np.nanmean(x, axis=1)
    means = np.empty((s, draws))
    step = max(1, _BLOCK // n)
    for start in range(0, draws, step):
        w = rng.multinomial(n, np.full(n, 1 / n), size=min(step, draws - start))  # [draws, n]
        count = has @ w.T  # [s, draws]
        total = np.where(has, x, 0.0) @ w.T
        block = np.where(count > 0, total / np.maximum(count, 1), overall[:, None])
        means[:, start : start + step] = block
    drawn = rng.integers(s, size=(s, draws))
    return np.asarray(means[drawn, np.arange(draws)[None, :]].mean(axis=0))


def ahead_of(reference: str, results: Mapping[str, MethodResults]) -> list[Difference]:
    """Return how far each other method is ahead of ``reference`` on test data, the farthest first,
    without those that have no client in common with it; ``results`` are by label."""
    leads = (one.ahead(results[reference]) for name, one in results.items() if name != reference)
    return sorted(filter(None, leads), key=lambda one: -one.value)


def difference_table(differences: Sequence[Difference], metric: Metric) -> TextTable:
    """Show paired differences of two methods, one a row."""
    rows = [
        [
            one.method, one.over, bare(metric, one.value, signed=True), one.interval(metric),
            one.words, f"{one.num_worse_off} of {one.num_clients}",
        ]
        for one in differences
    ]  # fmt: skip
    unit = "points" if is_percentage(metric) else "nats" if metric == "loss" else metric
    header = ["method", "against", f"ahead ({unit})", "95 % interval", "these data show"]
    title = f"Test {metric}: how far one method is ahead of another, client by client"
    return TextTable(title, [*header, "clients worse off"], rows, is_text={0, 1, 4})
