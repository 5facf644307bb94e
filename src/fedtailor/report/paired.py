"""The interval of a difference between two methods over the same clients and seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_MANY = 1000  # clients; a sample's mean of more of them is drawn from a normal distribution
_BLOCK = 4_000_000  # weights in memory at once


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
