"""The difference of two methods over the same clients and seeds, with an interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_MANY = 1000  # clients; a sample's mean of more of them is drawn from a normal distribution
_BLOCK = 4_000_000  # weights in memory at once


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
    """Compare two methods by a hierarchical bootstrap: seeds are drawn with replacement, then
    clients within each of them. A seed divides the data anew, so its clients are its own.

    With one seed the interval speaks of clients alone, and with three it says little of seeds.
    ``ours`` and ``theirs`` are the scores by client for each seed, in the same order; a client
    without one in one of the two is left out, and so is a seed without clients. With
    ``same_clients``, where a client of that name is the same one with every seed, clients are drawn
    once for all seeds. Raises ValueError where there are not as many seeds in both, or no pair.

    >>> paired([{"a": 0.5, "b": 0.75}], [{"a": 0.25, "b": 0.5}]).difference
    0.25
    """
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} and {len(theirs)} seeds; both methods need the same ones")
    differences = [_differences(x, y) for x, y in zip(ours, theirs, strict=True)]
    differences = [by_client for by_client in differences if by_client]
    if not differences:
        raise ValueError("no client has a score in both")
    rng = np.random.default_rng(seed)
    sample = _crossed if same_clients else _nested
    low, high = np.quantile(sample(differences, draws, rng), [0.025, 0.975])
    return Paired(
        difference=float(np.mean([np.mean(list(d.values())) for d in differences])),
        low=float(low),
        high=float(high),
        num_clients=sum(map(len, differences)),
        num_seeds=len(differences),
    )


def _differences(
    ours: Mapping[str, float | None], theirs: Mapping[str, float | None]
) -> dict[str, float]:
    pairs = ((client, score, theirs.get(client)) for client, score in ours.items())
    return {client: x - y for client, x, y in pairs if x is not None and y is not None}


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
