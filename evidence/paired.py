"""The difference of two methods over the same clients and seeds, with an interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedtailor.report.differences import interval_of


@dataclass(frozen=True)
class Paired:
    """How far one method is ahead of another."""

    difference: float  # the mean over seeds of the mean difference over clients
    low: float  # where its 95 % interval begins ...
    high: float  # ... and ends
    num_clients: int  # pairs of scores, counted over all seeds
    num_seeds: int  # with at least one pair


def paired(
    ours: Sequence[Mapping[str, float | None]],
    theirs: Sequence[Mapping[str, float | None]],
    *,
    same_clients: bool = False,
    draws: int = 2000,
    seed: int = 0,
) -> Paired:
    """Compare two methods by `interval_of` their differences.

    ``ours`` and ``theirs`` are the scores by client for each seed, in the same order; a client
    without one in one of the two is left out, and so is a seed without clients. Raises ValueError
    where there are not as many seeds in both, or no pair.

    >>> paired([{"a": 0.5, "b": 0.75}], [{"a": 0.25, "b": 0.5}]).difference
    0.25
    """
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} and {len(theirs)} seeds; both methods need the same ones")
    differences = [_differences(x, y) for x, y in zip(ours, theirs, strict=True)]
    differences = [by_client for by_client in differences if by_client]
    if not differences:
        raise ValueError("no client has a score in both")
    low, high = interval_of(differences, same_clients=same_clients, draws=draws, seed=seed)
    return Paired(
        difference=float(np.mean([np.mean(list(d.values())) for d in differences])),
        low=low,
        high=high,
        num_clients=sum(map(len, differences)),
        num_seeds=len(differences),
    )


def _differences(
    ours: Mapping[str, float | None], theirs: Mapping[str, float | None]
) -> dict[str, float]:
    pairs = ((client, score, theirs.get(client)) for client, score in ours.items())
    return {client: x - y for client, x, y in pairs if x is not None and y is not None}
