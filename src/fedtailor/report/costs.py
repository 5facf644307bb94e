"""What results cost, and the methods that no other one beats in result and cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..store.read import Trial
from ..store.records import RoundLine
from .select import Entry

COSTS = {  # what stands beside an axis of costs, and the unit
    "bytes": ("bytes per client (down and up)", "B"),
    "flops": ("operations of a client's training", "FLOP"),
    "simulated": ("simulated seconds until the reported round", "s"),
    "cpu": ("processor seconds of all clients' training", "s"),
    "seconds": ("seconds of the whole training", "s"),
}


def costs_of(entry: Entry, trial: Trial, reported: int) -> Mapping[str, float | None]:
    """Return each of ``COSTS`` for a trial, until the round ``reported`` where it is counted by
    round; None where it was not measured."""
    rounds = [record for record in trial.history if record.round <= reported]
    clients = entry.run.partitions[trial.seed].clients
    steps = sum(record.num_steps for record in rounds)
    flops = None if trial.costs is None else trial.costs.flops
    return {
        "bytes": sum(record.bytes_down + record.bytes_up for record in rounds) / clients,
        "flops": None if flops is None else flops * steps / clients,
        "simulated": simulated_seconds(rounds),
        "cpu": cpu_seconds(trial),
        "seconds": seconds(trial),
    }


def traffic(entry: Entry) -> tuple[float | None, float | None]:
    """Return the bytes down and up per client and round, over the committed rounds."""
    rounds = [record for trial in entry.trials for record in trial.history]
    visits = sum(record.num_trained for record in rounds)
    if not visits:
        return None, None
    down, up = sum(r.bytes_down for r in rounds), sum(r.bytes_up for r in rounds)
    return down / visits, up / visits


def seconds(trial: Trial) -> float:
    """Return the seconds of all rounds."""
    return sum(sum(timing.seconds.values()) for timing in trial.timings)


def cpu_seconds(trial: Trial) -> float | None:
    """Return the processor seconds of the clients' training; None where they are not known."""
    return _sum_of([timing.cpu_seconds for timing in trial.timings if timing.round])


def simulated_seconds(rounds: Sequence[RoundLine]) -> float | None:
    """Return the simulated seconds of some rounds of a trial; None if time was not simulated."""
    return _sum_of([record.simulated_seconds for record in rounds])


def _sum_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def mean_of(values: Iterable[float | None]) -> float | None:
    """Return the mean, over seeds; None where one is missing, or all are."""
    each = list(values)
    total = _sum_of(each)
    return None if total is None else total / len(each)


def front(points: Sequence[tuple[float, float]], *, higher_is_better: bool) -> list[bool]:
    """Say of each point (cost, result) whether no other one is as cheap and better, or as good and
    cheaper.

    >>> front([(1, 0.5), (2, 0.4), (3, 0.9)], higher_is_better=True)
    [True, False, True]
    """
    sign = 1 if higher_is_better else -1

    def beaten(x: float, y: float) -> bool:
        return any(c <= x and sign * v >= sign * y and (c, v) != (x, y) for c, v in points)

    return [not beaten(*point) for point in points]


def is_wide(costs: Sequence[float]) -> float:
    """Return the least cost above 0 if costs differ so much that their axis is logarithmic, or else
    0.

    >>> is_wide([1, 7]), is_wide([1, 8]), is_wide([0, 2, 3])
    (0, 1, 2)
    """
    positive = [cost for cost in costs if cost > 0]
    alike = not positive or (min(costs) > 0 and max(costs) < 8 * min(costs))
    return 0 if alike else min(positive)
