"""Metrics of evaluations, their summaries over clients, and the round with the best results."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..errors import InputError, unknown
from ..objectives import OBJECTIVES
from ..units import fixed

Metric = str  # accuracy, loss, or the name of one of the experiment's own metrics
ATTACK_SUCCESS = "attack_success"  # of a backdoor: a run with one has it as a metric
_LOWER = frozenset({"loss", ATTACK_SUCCESS}).union(*(one.errors for one in OBJECTIVES.values()))
_SHARES = frozenset({"accuracy", ATTACK_SUCCESS}).union(*(o.shares for o in OBJECTIVES.values()))
TUNED = {one.tunes for one in OBJECTIVES.values()}  # neither more nor less of them is better


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
class Summary:
    """The summary of one evaluation over the clients that have examples.

    For ``mean``, ``std`` (population), ``bottom_decile`` and ``worst`` every client counts once;
    for ``weighted`` every example counts once. Means are `rounded`.
    """

    mean: float
    weighted: float
    std: float
    bottom_decile: float
    worst: float
    clients: int
    without_examples: int


def rounded(mean: float) -> float:
    """A mean to 12 significant digits. The last digits of a sum depend on its order, so means that
    are equal on paper differ there, and one of them would win by chance.

    >>> (0.1 + 0.2 + 0.3) / 3 == (0.3 + 0.2 + 0.1) / 3
    False
    >>> rounded((0.1 + 0.2 + 0.3) / 3) == rounded((0.3 + 0.2 + 0.1) / 3)
    True
    """
    return float(f"{mean:.12g}")


def box_of(values: Sequence[float]) -> tuple[float, float, float, float, float]:
    """Return where a box and its whiskers are: the worst and the best tenth, at values that clients
    have, as in `summarise`, and between them the quartiles. From the lowest to the highest.

    >>> box_of([5.0, 1.0, 2.0, 3.0, 4.0])
    (1.0, 2.0, 3.0, 4.0, 5.0)
    """
    x = np.sort(np.asarray(values, dtype=np.float64))
    tenth = len(x) // 10
    lower, middle, upper = np.percentile(x, (25, 50, 75)).tolist()
    return float(x[tenth]), lower, middle, upper, float(x[-1 - tenth])


def summarise(
    values: Sequence[float | None], num_examples: Sequence[int | None], *, higher_is_better: bool
) -> Summary:
    """Summarise the ``values`` ``[n]`` of n clients; InputError where none has examples.

    Clients without examples (0 or None) are left out and counted. The bottom decile is element
    ``clients // 10`` of the values sorted from the worst one on. If a client has examples but no
    value, its value is not a number and the worst.

    >>> s = summarise([0.9, 0.5, None], [30, 10, 0], higher_is_better=True)
    >>> round(s.mean, 3), round(s.weighted, 3), round(s.std, 3), s.worst, s.without_examples
    (0.7, 0.8, 0.2, 0.5, 1)
    >>> summarise([0.1 * k for k in range(20)], [1] * 20, higher_is_better=False).bottom_decile
    1.7000000000000002
    """
    results = [
        (math.nan if value is None else float(value), count)
        for value, count in zip(values, num_examples, strict=True)
        if count
    ]
    if not results:
        raise InputError(f"none of {len(num_examples)} clients has examples to evaluate on")
    x, n = np.array(results, dtype=np.float64).T
    worst = -math.inf if higher_is_better else math.inf
    order = np.argsort(np.where(np.isnan(x), worst, x), kind="stable")
    worst_first = x[order if higher_is_better else order[::-1]]
    with np.errstate(invalid="ignore"):  # of infinite losses the spread is not a number
        mean, weighted, std = float(x.mean()), float((x * n).sum() / n.sum()), float(x.std())
    return Summary(
        mean=rounded(mean),
        weighted=rounded(weighted),
        std=std,
        bottom_decile=float(worst_first[len(x) // 10]),
        worst=float(worst_first[0]),
        clients=len(x),
        without_examples=len(num_examples) - len(x),
    )


def best_round(means: Mapping[int, float], metric: Metric) -> int:
    """Return the round with the best mean validation result by ``metric``; of equal rounds, the
    earliest. One whose mean is NaN is not the best, unless all are: then it is the last one.

    >>> best_round({0: 0.2, 5: 0.8, 10: 0.8, 15: float("nan")}, "accuracy")
    5
    """
    sign = -1 if higher_is_better(metric) else 1
    known = [(sign * mean, number) for number, mean in means.items() if not math.isnan(mean)]
    return min(known)[1] if known else max(means)


def higher_is_better(metric: Metric) -> bool:
    """Whether higher values are better: not of a loss, an error, or an attack's success."""
    return metric not in _LOWER


def is_percentage(metric: Metric) -> bool:
    """Return whether ``metric`` is shown in percent."""
    return metric in _SHARES


def scale_of(metric: Metric) -> tuple[float, int]:
    """The factor on a metric's values, and how many digits are shown."""
    return (100, 1) if is_percentage(metric) else (1, 3)


def bare(metric: Metric, value: float | None, *, signed: bool = False) -> str:
    """Format a result or a difference without its unit; ``-`` for none.

    >>> bare("accuracy", 0.0321), bare("accuracy", 0.0321, signed=True), bare("loss", None)
    ('3.2', '+3.2', '-')
    """
    if value is None or math.isnan(value):
        return "-"
    factor, digits = scale_of(metric)
    number = fixed(factor * value, digits)
    return f"+{number}" if signed and not number.startswith("-") else number


def unit_of(metric: Metric) -> str:
    """Return the unit of ``metric``, in brackets after a space; empty if it has none.

    >>> unit_of("accuracy"), unit_of("brier")
    (' (%)', '')
    """
    return " (%)" if is_percentage(metric) else " (nats)" if metric == "loss" else ""


def values_of(evaluation: ClientResults, metric: Metric) -> Sequence[float | None]:
    """Return the clients' values of ``metric``; None where it is undefined. Raises InputError where
    the run has no such metric."""
    if metric in ("accuracy", "loss"):
        return evaluation.accuracy if metric == "accuracy" else evaluation.loss
    if metric not in evaluation.metrics:
        allowed = ["accuracy", "loss", *evaluation.metrics]
        where = "the run (evaluate.metrics names what is measured)"
        raise unknown("metric", metric, allowed, where=where, kind="it has")
    return evaluation.metrics[metric]


def sizes_of(evaluation: ClientResults, metric: Metric) -> list[int]:
    """Return the clients' numbers of examples; 0 where one of the experiment's own metrics is
    undefined. Where the loss is no number, either, the model has diverged: no metric is one."""
    values = values_of(evaluation, metric)
    if metric in ("accuracy", "loss"):
        return list(evaluation.num_examples)
    known = zip(values, evaluation.loss, evaluation.num_examples, strict=True)
    return [0 if value is None and loss is not None else count for value, loss, count in known]


def summary(evaluation: ClientResults, metric: Metric) -> Summary:
    """Summarise ``evaluation`` over the clients that have examples, and for which ``metric`` is
    defined; NaN where it is for none of them. Raises InputError where the run has no such metric,
    or no client has examples.

    >>> from fedtailor.store.records import EvaluationLine
    >>> e = EvaluationLine(3, "personal", "test", [0, 1], [4, 0], [0.5, None], [0.75, None])
    >>> summary(e, "accuracy").mean
    0.75
    """
    values, sizes = values_of(evaluation, metric), sizes_of(evaluation, metric)
    if any(evaluation.num_examples) and not any(sizes):
        nan = math.nan
        return Summary(nan, nan, nan, nan, nan, clients=0, without_examples=len(sizes))
    return summarise(values, sizes, higher_is_better=higher_is_better(metric))
