"""A verdict on runs as data, and in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from .differences import FEWEST, Difference
from .numbers import amount, bare, seconds_text, si
from .select import Metric

_MORE = 1.05  # times another method's cost, before it is worth saying


@dataclass(frozen=True)
class Cost:
    """Bytes per client and round, down and up, and seconds of the whole training, mean over seeds;
    and how many times those of the method that has the fewest (of bytes: but some)."""

    bytes: float | None
    times_fewest_bytes: float | None
    fewest_bytes: str | None
    seconds: float
    times_fewest_seconds: float | None
    fewest_seconds: str


@dataclass(frozen=True)
class Verdict:
    """The verdict on runs with the same clients, as data; `sentences` puts it in words.

    ``best`` has the best mean validation result; these data can't tell ``ties`` from it, of which
    those ``ahead`` are better on test data. ``baseline`` is the next one that is another method,
    and ``alone`` is training without a federation. ``against_alone`` has every other method.
    ``worse_off`` names the clients that lose most with ``best`` against training alone.
    ``left_out`` says why a method could not be chosen.
    """

    runs: tuple[str, ...]
    metric: Metric
    best: str | None
    is_alone: bool  # the best method is training alone
    has_learned: bool | None  # whether `best` is above each client's most frequent class
    not_learned: tuple[str, ...]  # the other methods that are not
    is_finished: bool
    methods: int
    ties: tuple[str, ...]
    ahead: tuple[Difference, ...]
    baseline: Difference | None
    alone: Difference | None
    against_alone: tuple[Difference, ...]
    worse_off: tuple[str, ...]
    cost: Cost | None
    left_out: Mapping[str, str]

    @property
    def text(self) -> tuple[str, ...]:
        """The verdict in sentences, the most important first."""
        return tuple(_sentences(self))


def _sentences(v: Verdict) -> Iterator[str]:
    if v.best is None:
        yield "No method has validation results to choose it by, so none is named the best."
        yield from _left_out(v)
        return
    so_far = "" if v.is_finished else "So far, "
    if v.methods == 1:
        yield f"{v.best} is the only method, so there is nothing to compare it with."
    elif v.is_alone:
        name = "training alone" if so_far else "Training alone"
        yield (
            f"{so_far}{name} ({v.best}) is best on validation data{_ties(v)}: no method is ahead "
            "of it."
        )
    else:
        yield f"{so_far}{v.best} is best on validation data{_ties(v)}."
    if clauses := list(_clauses(v)):
        yield f"On test data {', and '.join(clauses)}."
    for one in v.ahead:
        yield (
            f"{one.method}, which could have been chosen as well, is "
            f"{amount(v.metric, one.value)} better than {v.best} on test data (95 % interval "
            f"{_interval(v.metric, one.low, one.high)})."
        )
    if v.has_learned is False:
        yield (
            f"{v.best} did not learn: its accuracy is not above that of each client's most "
            "frequent class."
        )
    yield from _against_alone(v)
    yield from _cost(v)
    yield from _scope(v)
    yield from _left_out(v)


def _ties(v: Verdict) -> str:
    if not v.ties:
        return ""
    return f", which can't tell it from {_and(v.ties)}"


def _and(names: tuple[str, ...]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _clauses(v: Verdict) -> Iterator[str]:
    """Say how the best method stands to the strongest other one, and to training alone."""
    other, alone = v.baseline, v.alone
    if other is not None and alone is not None and other.over == alone.over:
        yield _clause(v.metric, other, "training alone, the strongest other method")
        return
    if other is not None:
        yield _clause(v.metric, other, f"{other.over}, the strongest other method")
    if alone is not None:
        yield _clause(v.metric, alone, "training alone")


def _clause(metric: Metric, d: Difference, name: str) -> str:
    value = amount(metric, abs(d.value))
    if d.reading == "no difference":
        shown = amount(metric, d.value, signed=True)
        why = (
            f": {d.num_clients} client{'s are' if d.num_clients > 1 else ' is'} too few for an "
            f"interval ({shown})"
            if d.num_clients < FEWEST
            else f" ({shown}, 95 % interval {_interval(metric, d.low, d.high, signed=True)})"
        )
        end = "," if "," in name else ""
        return f"there is no difference from {name}{end} that these data can show{why}"
    low, high = (d.low, d.high) if d.reading == "better" else (-d.high, -d.low)
    interval = _interval(metric, low, high)
    return f"its {metric} is {value} {d.reading} than that of {name} (95 % interval {interval})"


def _interval(metric: Metric, low: float, high: float, *, signed: bool = False) -> str:
    return f"{bare(metric, low, signed=signed)} to {bare(metric, high, signed=signed)}"


def _against_alone(v: Verdict) -> Iterator[str]:
    """Name the clients and the methods that do worse than training alone."""
    d = v.alone
    if d is not None and d.num_worse_off:
        more = d.num_worse_off - len(v.worse_off)
        names = ", ".join(v.worse_off) + (f" and {more} more" if more else "")
        yield (
            f"With {v.best} {d.num_worse_off} of {d.num_clients} clients do worse than alone: "
            f"{names}."
        )
    elif d is not None:
        yield f"With {v.best} none of {d.num_clients} clients does worse than alone."
    elif not v.is_alone and v.methods > 1:
        yield "Training alone (local) is not among the methods, so who loses against it is unknown."
    behind = [one for one in v.against_alone if one.reading == "worse" and one.method != v.best]
    if behind:
        names = ", ".join(
            f"{one.method} ({bare(v.metric, one.value, signed=True)})"
            for one in sorted(behind, key=lambda one: one.value)
        )
        yield f"Worse than training alone: {names}."
    if v.not_learned and v.is_finished:
        yield (
            f"{_and(v.not_learned)} did not learn: before you give "
            f"{'it' if len(v.not_learned) == 1 else 'them'} up, try smaller learning rates "
            "(fedtailor tune searches for them)."
        )


def _cost(v: Verdict) -> Iterator[str]:
    cost = v.cost
    if cost is None or cost.bytes is None:
        return
    times = cost.times_fewest_bytes
    if not cost.bytes:
        traffic = f"{v.best} sends nothing"
    else:
        traffic = f"{v.best} sends and receives {si(cost.bytes, 'B')} per client and round"
        if times is not None and times >= _MORE:
            traffic += f", {times:.3g} times as much as {cost.fewest_bytes}"
    time = f"took {seconds_text(cost.seconds)} s"
    if cost.times_fewest_seconds is not None and cost.times_fewest_seconds >= _MORE:
        time += f", {cost.times_fewest_seconds:.2g} times as long as {cost.fewest_seconds}"
    yield f"{traffic}, and {time}."


def _scope(v: Verdict) -> Iterator[str]:
    """Say what the intervals cover."""
    found = [one for one in (v.baseline, v.alone) if one is not None]
    if not found or max(one.num_clients for one in found) < FEWEST:
        return
    widest = max(found, key=lambda one: one.num_clients)
    clients, seeds = widest.num_clients, widest.num_seeds
    covered = f"The intervals cover {clients} clients"
    if seeds == 1:
        yield f"{covered} of one seed; with another seed it may turn out otherwise."
    elif seeds < 5:
        yield f"{covered} over {seeds} seeds, which say little of other seeds."
    else:
        yield f"{covered} over {seeds} seeds."


def _left_out(v: Verdict) -> Iterator[str]:
    if v.left_out:
        reasons = "; ".join(f"{label} {why}" for label, why in v.left_out.items())
        yield f"Not in the choice: {reasons}."
