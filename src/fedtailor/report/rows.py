"""A row of the comparison: a method's results at the selected rounds, and its costs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import mean

import numpy as np

from ..store.metrics import Metric, Summary, summarise, summary
from ..store.selection import Model, by_round, select_by, validated
from .clients import worst_clients
from .costs import cpu_seconds, mean_of, seconds, simulated_seconds, traffic
from .select import Entry, goes_on, reported
from .untrained import Untrained, untrained_of


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over seeds (None for one seed)."""

    mean: float
    std: float | None

    @staticmethod
    def of(values: Iterable[float]) -> Spread:
        """Compute the spread of one value a seed.

        >>> Spread.of([1.0, 2.0, 3.0])
        Spread(mean=2.0, std=1.0)
        >>> Spread.of([4.0])
        Spread(mean=4.0, std=None)
        """
        x = np.asarray(list(values), dtype=np.float64)
        return Spread(float(x.mean()), float(x.std(ddof=1)) if len(x) > 1 else None)


@dataclass(frozen=True)
class Spreads:
    """Summaries of a measure over clients, over seeds."""

    mean: Spread
    weighted: Spread
    std: Spread
    bottom_decile: Spread
    worst: Spread


def _spreads(summaries: Sequence[Summary]) -> dict[str, Spread]:
    names = (field.name for field in fields(Spreads))
    return {name: Spread.of(getattr(one, name) for one in summaries) for name in names}


@dataclass(frozen=True, kw_only=True)
class ModelResult(Spreads):
    """Test results of one model at the selected rounds.

    The summaries are those of the shown measure: accuracy, or loss for language modelling, or
    another metric that was asked for. ``loss`` and ``accuracy`` are means over clients, and so are
    the experiment's own ``metrics``: over those for which each is defined, ``metric_clients``.
    ``perplexity`` is exp(mean loss).
    """

    rounds: Sequence[int]  # one a seed
    by_validation: bool
    loss: Spread
    accuracy: Spread
    perplexity: Spread | None
    clients: Sequence[int]  # how many, one a seed
    without_examples: Sequence[int]
    worst_client: Sequence[str]  # its name, or else its number, one a seed
    majority: Spread | None  # the mean of `Majority` on the same test examples
    did_not_learn: bool | None  # whether `mean` is not above `majority`; None: unknown
    metrics: Mapping[str, Spread] = field(default_factory=dict)
    metric_clients: Mapping[str, Sequence[int]] = field(default_factory=dict)  # one a seed


@dataclass(frozen=True, kw_only=True)
class Majority(Spreads):
    """Test accuracy of the most frequent class of each client's own training examples."""

    run: str
    run_name: str  # as labels have it


@dataclass(frozen=True)
class Row:
    """One method: results of its personal and global models, and their cost."""

    label: str
    run: str
    method: str
    seeds: Sequence[int]
    progress: str  # empty if finished
    personal_model: ModelResult | None
    global_model: ModelResult | None
    validation: Spread | None  # of the personal models at their rounds, in `Table.chosen_by`
    novel_clients: ModelResult | None
    before: Spread | None  # the personal models that the method went on from; None: it did not
    bytes_down: float | None  # per client and round, over the committed rounds
    bytes_up: float | None
    trained: float | None  # None: training diverged in the first round with every seed
    communicated: float | None
    private: float | None
    flops: float | None  # of a client's training on one batch; None: not counted
    seconds: float  # of all rounds, mean over seeds
    cpu_seconds: float | None  # of the clients' training, mean over seeds; None: not known
    simulated_seconds: float | None  # of all rounds, mean over seeds; None: not simulated
    epsilon: float | None = None  # of privacy that is spent, the most of a seed; None: no noise
    untrained: Untrained | None = None  # clients whose private parts never trained
    group: int = 0  # of runs that have clients in common; only its rows are ranked together


def _majorities(entry: Entry, model: Model, metric: Metric) -> list[Summary]:
    """The majority class's results, one a seed; none if they are not known for all seeds."""
    if metric != "accuracy":
        return []
    found: list[Summary] = []
    for trial, one in reported(entry, model):
        accuracy = entry.run.partitions[trial.seed].majority_accuracy(one.test.clients)
        if accuracy is None:
            return []
        found.append(summarise(accuracy, one.test.num_examples, higher_is_better=True))
    return found


def majority_rows(entries: Sequence[Entry], metric: Metric) -> list[Majority]:
    """Return one row a run, of its first method that has one; equal rows once."""
    rows: dict[tuple[Spread, ...], Majority] = {}  # by what they show
    for entry in entries:
        path = str(entry.run.path)
        has_row = any(row.run == path for row in rows.values())
        if not has_row and (summaries := _majorities(entry, "personal", metric)):
            found = _spreads(summaries)
            row = Majority(run=path, run_name=entry.run_name, **found)
            rows.setdefault(tuple(found.values()), row)
    return list(rows.values())


def _validation(entry: Entry, metric: Metric) -> Spread | None:
    found = [validated(trial, "personal", select_by(entry.run)) for trial in entry.trials]
    values = [summary(one[1], metric).mean for one in found if one is not None]
    known = [value for value in values if not math.isnan(value)]
    return Spread.of(known) if known else None


def _result(entry: Entry, model: Model, metric: Metric) -> ModelResult | None:
    by_trial = reported(entry, model)
    if not by_trial:
        return None
    selected = [one for _, one in by_trial]
    summaries = [summary(one.test, metric) for one in selected]
    losses = [summary(one.test, "loss").mean for one in selected]
    measured = [one for trial in entry.trials for one in trial.evaluations[:1]]
    names = dict.fromkeys(name for one in measured for name in one.metrics)
    others = {name: [summary(one.test, name) for one in selected] for name in names}
    is_lm = entry.run.objective.learns_texts
    perplexities = [math.exp(loss) if loss < 700 else math.inf for loss in losses]
    majorities = _majorities(entry, model, metric)
    majority = Spread.of(one.mean for one in majorities) if majorities else None
    over_seeds = Spread.of(one.mean for one in summaries)
    return ModelResult(
        **_spreads(summaries),
        rounds=[one.round for one in selected],
        by_validation=all(one.by_validation for one in selected),
        loss=Spread.of(losses),
        accuracy=Spread.of(summary(one.test, "accuracy").mean for one in selected),
        perplexity=Spread.of(perplexities) if is_lm else None,
        clients=[sum(map(bool, one.test.num_examples)) for one in selected],
        without_examples=[one.test.num_examples.count(0) for one in selected],
        worst_client=[
            next(map(entry.run.partitions[trial.seed].name, worst_clients(one.test, metric, 1)), "")
            for trial, one in by_trial
        ],
        majority=majority,
        did_not_learn=None if majority is None else not over_seeds.mean > majority.mean,
        metrics={name: Spread.of(one.mean for one in of) for name, of in others.items()},
        metric_clients={name: [one.clients for one in of] for name, of in others.items()},
    )


def _before(entry: Entry, metric: Metric) -> Spread | None:
    if not goes_on(entry.run):
        return None
    tests = [by_round(trial, "personal", "test").get(0) for trial in entry.trials]
    means = [summary(test, metric).mean for test in tests if test is not None]
    return Spread.of(means) if means else None


def _progress(entry: Entry) -> str:
    states = {trial.seed: trial.progress for trial in entry.trials}
    if len(set(states.values())) == 1:
        return entry.trials[0].progress
    return "; ".join(f"seed {seed}: {state}" for seed, state in states.items() if state)


def row_of(entry: Entry, metric: Metric, chosen_by: Metric, group: int) -> Row:
    """Return the row of a method, by ``metric``; its validation result is by ``chosen_by``."""
    costs = [trial.costs for trial in entry.trials if trial.costs is not None]
    down, up = traffic(entry)
    spent = [trial.history[-1].epsilon for trial in entry.trials if trial.history]
    return Row(
        label=entry.label,
        run=str(entry.run.path),
        method=entry.method,
        seeds=[trial.seed for trial in entry.trials],
        progress=_progress(entry),
        personal_model=_result(entry, "personal", metric),
        global_model=_result(entry, "global", metric),
        validation=_validation(entry, chosen_by),
        novel_clients=_result(entry, "novel", metric),
        before=_before(entry, metric),
        bytes_down=down,
        bytes_up=up,
        trained=mean_of(cost.trained for cost in costs),
        communicated=mean_of(cost.communicated for cost in costs),
        private=mean_of(cost.private for cost in costs),
        flops=mean_of(cost.flops for cost in costs if cost.flops is not None),
        seconds=mean(map(seconds, entry.trials)),
        cpu_seconds=mean_of(map(cpu_seconds, entry.trials)),
        simulated_seconds=mean_of(simulated_seconds(trial.history) for trial in entry.trials),
        epsilon=max((one for one in spent if one is not None), default=None),
        untrained=untrained_of(entry, metric),
        group=group,
    )
