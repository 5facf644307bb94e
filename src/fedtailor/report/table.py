"""The comparison of methods: one row a method, with results at the round selected on validation."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from tabulate import tabulate

from .clients import ClientRow, client_rows, client_tables, worst_clients
from .majority import NOT_LEARNED, majority_summary
from .metrics import Summary
from .notes import caption, footnotes
from .read import Run, StrPath, read_all
from .select import (
    Entry,
    Metric,
    Model,
    SelectedRound,
    by_round,
    entries,
    goes_on,
    is_percentage,
    metric_of,
    own_metrics,
    select_by,
    select_round,
    summary,
    unit_of,
)
from .text import TextTable


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
class Result:
    """Test results of one model at the selected rounds.

    ``mean`` to ``worst`` summarise the measure over clients: accuracy, or loss for language
    modelling, or another metric that was asked for. ``loss`` and ``accuracy`` are means over
    clients, and so are the experiment's own ``metrics``: over those for which each is defined,
    ``metric_clients``. ``perplexity`` is exp(mean loss).
    """

    rounds: Sequence[int]  # one a seed
    by_validation: bool
    mean: Spread
    weighted: Spread
    std: Spread
    bottom_decile: Spread
    worst: Spread
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


@dataclass(frozen=True)
class Majority:
    """Test accuracy of the most frequent class of each client's own training examples."""

    run: str
    run_name: str  # as labels have it
    mean: Spread
    weighted: Spread
    std: Spread
    bottom_decile: Spread
    worst: Spread


@dataclass(frozen=True)
class Row:
    """One method: results of its personal and global models, and their cost."""

    label: str
    run: str
    method: str
    seeds: Sequence[int]
    progress: str  # empty if finished
    personal_model: Result | None
    global_model: Result | None
    novel_clients: Result | None
    before: Spread | None  # the personal models that the method went on from; None: it did not
    bytes_down: float | None  # per client and round, over the committed rounds
    bytes_up: float | None
    trained: float | None  # None: training diverged in the first round with every seed
    communicated: float | None
    private: float | None
    seconds: float  # of all rounds, mean over seeds


@dataclass(frozen=True)
class Table:
    """The rows, a caption that describes them, and notes to read before comparing them."""

    metric: Metric
    rows: Sequence[Row]
    caption: str
    notes: Sequence[str]
    majority_class: Sequence[Majority] = ()  # one a run; runs with equal ones share it
    clients: Sequence[ClientRow] = ()  # where clients have names and are few


def _perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def _spread(summaries: Sequence[Summary], field: Callable[[Summary], float]) -> Spread:
    return Spread.of(field(one) for one in summaries)


def _majorities(entry: Entry, model: Model, metric: Metric) -> list[Summary]:
    """Return the majority class's results on the model's test examples, one a seed; none if they
    are not known for all seeds."""
    select = select_by(entry.run)
    selected = [(trial, select_round(trial, model, select)) for trial in entry.trials]
    found = [
        majority_summary(entry.run.partitions[trial.seed], one.test)
        for trial, one in selected
        if one is not None
    ]
    known = [one for one in found if one is not None]
    return known if metric == "accuracy" and len(known) == len(found) else []


def _majority(entry: Entry, metric: Metric) -> Majority | None:
    summaries = _majorities(entry, "personal", metric)
    if not summaries:
        return None
    return Majority(
        run=str(entry.run.path),
        run_name=entry.run_name,
        mean=_spread(summaries, lambda one: one.mean),
        weighted=_spread(summaries, lambda one: one.weighted),
        std=_spread(summaries, lambda one: one.std),
        bottom_decile=_spread(summaries, lambda one: one.bottom_decile),
        worst=_spread(summaries, lambda one: one.worst),
    )


def _majority_rows(entries: Sequence[Entry], metric: Metric) -> list[Majority]:
    """Return one row a run, of its first method that has one; equal rows once."""
    rows: dict[str, Majority] = {}
    for entry in entries:
        path = str(entry.run.path)
        if path not in rows and (row := _majority(entry, metric)) is not None:
            rows[path] = row
    different: list[Majority] = []
    for row in rows.values():
        if not any(
            replace(row, run=other.run, run_name=other.run_name) == other for other in different
        ):
            different.append(row)
    return different


def _result(entry: Entry, model: Model, metric: Metric) -> Result | None:
    by_trial = [(trial, select_round(trial, model, select_by(entry.run))) for trial in entry.trials]
    partitions = [entry.run.partitions[trial.seed] for trial, one in by_trial if one is not None]
    selected: list[SelectedRound] = [one for _, one in by_trial if one is not None]
    if not selected:
        return None
    summaries = [summary(one.test, metric) for one in selected]
    losses = [summary(one.test, "loss").mean for one in selected]
    others = {
        name: [summary(one.test, name) for one in selected] for name in own_metrics(entry.trials)
    }
    is_lm = entry.run.is_language_modelling
    majorities = _majorities(entry, model, metric)
    majority = _spread(majorities, lambda one: one.mean) if majorities else None

    def spread(field: Callable[[Summary], float]) -> Spread:
        return _spread(summaries, field)

    return Result(
        rounds=[one.round for one in selected],
        by_validation=all(one.by_validation for one in selected),
        mean=spread(lambda one: one.mean),
        weighted=spread(lambda one: one.weighted),
        std=spread(lambda one: one.std),
        bottom_decile=spread(lambda one: one.bottom_decile),
        worst=spread(lambda one: one.worst),
        loss=Spread.of(losses),
        accuracy=Spread.of(summary(one.test, "accuracy").mean for one in selected),
        perplexity=Spread.of(map(_perplexity, losses)) if is_lm else None,
        clients=[sum(map(bool, one.test.num_examples)) for one in selected],
        without_examples=[one.test.num_examples.count(0) for one in selected],
        worst_client=[
            partition.name(worst_clients(one.test, metric, 1)[0])
            for partition, one in zip(partitions, selected, strict=True)
        ],
        majority=majority,
        did_not_learn=None
        if majority is None
        else not spread(lambda one: one.mean).mean > majority.mean,
        metrics={name: Spread.of(one.mean for one in of) for name, of in others.items()},
        metric_clients={name: [one.clients for one in of] for name, of in others.items()},
    )


def _before(entry: Entry, metric: Metric) -> Spread | None:
    """The mean over clients of the test results before training."""
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


def _row(entry: Entry, metric: Metric) -> Row:
    rounds = [record for trial in entry.trials for record in trial.history]
    visits = sum(len(record.cohort) for record in rounds)
    costs = [trial.costs for trial in entry.trials if trial.costs is not None]
    seconds = [
        sum(sum(timing.seconds.values()) for timing in trial.timings) for trial in entry.trials
    ]
    return Row(
        label=entry.label,
        run=str(entry.run.path),
        method=entry.method,
        seeds=[trial.seed for trial in entry.trials],
        progress=_progress(entry),
        personal_model=_result(entry, "personal", metric),
        global_model=_result(entry, "global", metric),
        novel_clients=_result(entry, "novel", metric),
        before=_before(entry, metric),
        bytes_down=sum(record.bytes_down for record in rounds) / visits if visits else None,
        bytes_up=sum(record.bytes_up for record in rounds) / visits if visits else None,
        trained=float(np.mean([cost.trained for cost in costs])) if costs else None,
        communicated=float(np.mean([cost.communicated for cost in costs])) if costs else None,
        private=float(np.mean([cost.private for cost in costs])) if costs else None,
        seconds=float(np.mean(seconds)),
    )


def table(runs: Sequence[Run], metric: Metric | None = None, *, short_notes: bool = False) -> Table:
    """Compare all methods in ``runs``, in the experiments' order, by ``metric``. With
    ``short_notes`` the notes name a few of many clients."""
    metric = metric_of(runs) if metric is None else _known(metric)
    all_entries = entries(runs)
    rows = [_row(entry, metric) for entry in all_entries]
    majority = _majority_rows(all_entries, metric)
    results = [row.personal_model for row in rows if row.personal_model is not None]
    without_examples = [max(result.without_examples) for result in results]
    return Table(
        metric=metric,
        rows=rows,
        caption=caption(
            runs,
            metric,
            by_validation=all(r.by_validation for r in results),
            has_majority=bool(majority),
        ),
        notes=[*footnotes(runs, without_examples, short=short_notes), *_undefined(results)],
        majority_class=majority,
        clients=client_rows(all_entries, metric),
    )


def _known(metric: Metric) -> Metric:
    """A built-in metric may be written with a hyphen."""
    name = metric.replace("-", "_")
    return name if name == "macro_f1" else metric


def _undefined(results: Sequence[Result]) -> list[str]:
    """Notes on metrics that are not defined for every client."""
    most: dict[str, int] = {}
    for result in results:
        for name, clients in result.metric_clients.items():
            missing = (n - m for n, m in zip(result.clients, clients, strict=True))
            most[name] = max(most.get(name, 0), *missing)
    return [
        f"{name} is undefined for up to {count} of the clients that have test examples; they are "
        "left out of its mean"
        for name, count in most.items()
        if count
    ]


def si(value: float | None, unit: str = "") -> str:
    """Format ``value`` with three digits and a prefix of the SI.

    >>> si(147_456), si(1_250_000, "B"), si(12), si(None)
    ('147k', '1.25 MB', '12', '-')
    """
    if value is None:
        return "-"
    power = 0
    while abs(value) >= 999.5 and power < 4:
        value, power = value / 1000, power + 1
    return f"{value:.3g}{' ' if unit else ''}{('', 'k', 'M', 'G', 'T')[power]}{unit}"


def _cell(spread: Spread | None, scale: float, digits: int, *, seeds: bool = True) -> str:
    if spread is None:
        return "-"
    mean = f"{scale * spread.mean:.{digits}f}"
    return mean if spread.std is None or not seeds else f"{mean}±{scale * spread.std:.{digits}f}"


def _rounds(result: Result | None) -> str:
    if result is None:
        return "-"
    if len(result.rounds) > 2 and len(set(result.rounds)) > 1:
        return f"{min(result.rounds)}-{max(result.rounds)}"
    return ", ".join(map(str, dict.fromkeys(result.rounds)))


def _name(row: Row) -> str:
    has_learned = row.personal_model is None or not row.personal_model.did_not_learn
    remarks = ", ".join(filter(None, [row.progress, "" if has_learned else NOT_LEARNED]))
    return f"{row.label} ({remarks})" if remarks else row.label


def _majority_cells(comparison: Table, columns: int) -> list[list[str]]:
    """Return the rows of the majority class, ``columns`` wide."""
    several = len(comparison.majority_class) > 1
    cells = []
    for one in comparison.majority_class:
        values = (one.mean, one.weighted, one.std, one.bottom_decile, one.worst)
        texts = [f"majority class ({one.run_name})" if several else "majority class"]
        texts += [_cell(v, 100, 1, seeds=v is one.mean or v is one.weighted) for v in values]
        cells.append(texts + ["-"] * (columns - len(texts)))
    return cells


def _results(comparison: Table) -> TextTable:
    results = [row.personal_model for row in comparison.rows if row.personal_model is not None]
    is_lm = any(result.perplexity is not None for result in results)
    scale, digits = _format(comparison.metric)
    others = _other_metrics(comparison.metric, results)
    header = ["method", comparison.metric, "weighted", "std", "decile", "worst"]
    header += ["ppl", "token\nacc. %"] if is_lm else others
    header += ["round", "global", "its\nround"]
    has_novel = any(row.novel_clients for row in comparison.rows)
    header += ["novel", "its\nround"] if has_novel else []
    has_before = any(row.before for row in comparison.rows)
    header += ["before"] if has_before else []
    cells = []
    for row in comparison.rows:
        personal, shared, novel = row.personal_model, row.global_model, row.novel_clients
        texts = [_name(row)]
        if personal is None:
            texts += ["-"] * (7 if is_lm else 5 + len(others))
        else:
            texts += [_cell(personal.mean, scale, digits)]
            texts += [
                _cell(value, scale, digits, seeds=not is_lm and value is personal.weighted)
                for value in (
                    personal.weighted, personal.std, personal.bottom_decile, personal.worst,
                )
            ]  # fmt: skip
            if is_lm:
                texts += [_cell(personal.perplexity, 1, 1), _cell(personal.accuracy, 100, 1)]
            else:
                texts += [_cell(_mean(personal, name), *_format(name)) for name in others]
        texts += [
            _rounds(personal),
            _cell(shared.mean if shared else None, scale, digits),
            _rounds(shared),
        ]
        if has_novel:
            texts += [_cell(novel.mean if novel else None, scale, digits), _rounds(novel)]
        if has_before:
            texts += [_cell(row.before, scale, digits)]
        cells.append(texts)
    cells += _majority_cells(comparison, len(header))
    return TextTable(f"Test {comparison.metric}{unit_of(comparison.metric)}", header, cells)


def _format(metric: Metric) -> tuple[float, int]:
    """The factor on a metric's values, and how many digits are shown."""
    return (100, 1) if is_percentage(metric) else (1, 3)


def _other_metrics(shown: Metric, results: Sequence[Result]) -> list[Metric]:
    """The metrics beside the one that is ``shown``."""
    names = dict.fromkeys(name for result in results for name in result.metrics)
    accuracy = [] if shown == "accuracy" else ["accuracy"]
    return [*accuracy, *(name for name in names if name != shown)]


def _mean(result: Result, metric: Metric) -> Spread | None:
    return result.accuracy if metric == "accuracy" else result.metrics.get(metric)


def _costs(comparison: Table) -> TextTable:
    header = ["method", "down", "up", "trained", "communicated", "private", "seconds"]
    cells = [
        [
            row.label,
            si(row.bytes_down, "B"),
            si(row.bytes_up, "B"),
            si(row.trained),
            si(row.communicated),
            si(row.private),
            f"{row.seconds:.0f}" if row.seconds >= 10 else f"{row.seconds:.1f}",
        ]
        for row in comparison.rows
    ]
    title = "Cost: bytes per client and round, parameters per client, seconds of the whole training"
    return TextTable(title, header, cells)


def text_tables(comparison: Table) -> list[TextTable]:
    """Format the results, those of named clients, and the costs."""
    clients = client_tables(comparison.clients, comparison.metric)
    return [_results(comparison), *clients, _costs(comparison)]


def to_text(comparison: Table) -> str:
    """Format ``comparison`` for a terminal of 120 columns, with its caption and footnotes."""
    width = 18 if comparison.metric == "loss" else 28
    parts = [
        one.title
        + "\n"
        + tabulate(
            one.cells,
            headers=one.header,
            colalign=["left"] + ["right"] * (len(one.header) - 1),
            disable_numparse=True,
            maxcolwidths=[width] + [None] * (len(one.header) - 1),
        )
        for one in text_tables(comparison)
    ]
    return "\n\n".join([*parts, "\n".join([comparison.caption, *comparison.notes])])


def _finite(value: Any) -> Any:
    """Replace numbers that are not finite, for which JSON has no form, by None."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_json(comparison: Table) -> str:
    """Format ``comparison`` as JSON in full precision; numbers that are not finite are null.

    >>> to_json(Table("accuracy", [], "Test accuracy.", []))[:26]
    '{\\n  "metric": "accuracy",\\n'
    """
    return json.dumps(_finite(dataclasses.asdict(comparison)), indent=2, allow_nan=False)


def compare(
    paths: StrPath | Sequence[StrPath], as_json: bool = False, metric: Metric | None = None
) -> str:
    """Compare the runs at ``paths``, one or several, as text or as JSON.

    ``metric`` is what is shown: accuracy, loss, or one of the experiment's own metrics. None: the
    one by which the runs select the reported round. The rounds stay the same.

    Raises:
        InputError: a path has no run with a committed round, or a file of a run is damaged.

    >>> compare("nowhere")
    Traceback (most recent call last):
    fedtailor.errors.InputError: no directory 'nowhere'; give one that `fedtailor run` wrote
    """
    comparison = table(read_all(paths), metric, short_notes=not as_json)
    return to_json(comparison) if as_json else to_text(comparison)
