"""The difference of two methods over the same clients and seeds, with an interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Paired:
    """How far one method is ahead of another.

    Attributes:
        difference: the mean over seeds of the mean difference over clients.
        low: where its 95 % interval begins.
        high: where it ends.
        num_clients: pairs of scores, counted over all seeds.
        num_seeds: seeds with at least one pair.
    """

    difference: float
    low: float
    high: float
    num_clients: int
    num_seeds: int


def paired(
    ours: Sequence[Mapping[str, float | None]],
    theirs: Sequence[Mapping[str, float | None]],
    *,
    draws: int = 2000,
    seed: int = 0,
) -> Paired:
    """Compare two methods by a hierarchical bootstrap: seeds are drawn with replacement, then
    clients within each of them. A seed divides the data anew, so its clients are its own.

    With one seed the interval speaks of clients alone, and with three it says little of seeds.

    Args:
        ours: for each seed, the scores by client.
        theirs: the scores of the other method, with the seeds in the same order. A client without
            a score in one of the two is left out; so is a seed without clients.
        draws: samples of the bootstrap.
        seed: of its random numbers.

    Raises:
        ValueError: there are not as many seeds in both, or no pair of scores.

    >>> paired([{"a": 0.5, "b": 0.75}], [{"a": 0.25, "b": 0.5}]).difference
    0.25
    """
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} and {len(theirs)} seeds; both methods need the same ones")
    differences = [_differences(x, y) for x, y in zip(ours, theirs, strict=True)]
    differences = [d for d in differences if len(d)]
    if not differences:
        raise ValueError("no client has a score in both")
    s = len(differences)
    rng = np.random.default_rng(seed)
    # row i, seed j: what the i-th drawn seed has in each draw, if it is seed j
    means = np.array([[_means(d, draws, rng) for d in differences] for _ in range(s)])
    drawn = rng.integers(s, size=(s, draws))
    rows, columns = np.arange(s)[:, None], np.arange(draws)[None, :]
    low, high = np.quantile(means[rows, drawn, columns].mean(axis=0), [0.025, 0.975])
    return Paired(
        difference=float(np.mean([d.mean() for d in differences])),
        low=float(low),
        high=float(high),
        num_clients=sum(map(len, differences)),
        num_seeds=s,
    )


def _differences(
    ours: Mapping[str, float | None], theirs: Mapping[str, float | None]
) -> np.ndarray:
    """The differences of the clients with two scores."""
    pairs = [(score, theirs.get(client)) for client, score in ours.items()]
    return np.array([x - y for x, y in pairs if x is not None and y is not None])


def _means(values: np.ndarray, draws: int, rng: np.random.Generator) -> np.ndarray:
    """The mean of a sample with replacement, ``draws`` times."""
    drawn = rng.integers(len(values), size=(draws, len(values)))
    return np.asarray(values[drawn].mean(axis=1))
