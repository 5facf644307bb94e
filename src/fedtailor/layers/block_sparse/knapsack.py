"""The 0-1 knapsack problem, exactly or greedily."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

Bool = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def knapsack(
    importance: ArrayLike, sizes: ArrayLike, capacity: int, always: ArrayLike | None = None
) -> Bool:
    """Which blocks to keep, so that the sum of their importances is largest: exactly.

    Blocks of one size are kept in order of importance, so that one size after the other is merged
    into all partial sums. A partial sum stays if no smaller one is worth as much, and if it can
    still become the best.

    Args:
        importance: G ``[L]``; a block whose importance isn't positive is kept only if ``always``
            says so.
        sizes: W ``[L]``, non-negative integers.
        capacity: the largest sum of the kept blocks' sizes.
        always: bool ``[L]``, blocks that are kept in any case, for which there is room; None: none.

    Returns:
        bool ``[L]``; of equally good solutions one of the smallest.

    >>> knapsack([0.9, 0.5, 0.5], [5, 3, 3], 6)
    array([False,  True,  True])
    """
    G, W, kept, room = _checked(importance, sizes, capacity, always)
    kept |= (G > 0) & (W == 0)
    free = np.flatnonzero(~kept & (G > 0) & (room >= W))
    kept[free] = _exact(G[free], W[free], room)
    return kept


def greedy(
    importance: ArrayLike, sizes: ArrayLike, capacity: int, always: ArrayLike | None = None
) -> Bool:
    """As `knapsack`, approximately: every block that still fits, by importance over size."""
    G, W, kept, room = _checked(importance, sizes, capacity, always)
    free = np.flatnonzero(~kept & (G > 0) & (room >= W))
    kept[free] = _greedy(G[free], W[free], room)
    return kept


def _checked(
    importance: ArrayLike, sizes: ArrayLike, capacity: int, always: ArrayLike | None
) -> tuple[Floats, Ints, Bool, int]:
    """Importances, sizes, the blocks that are always kept, and the room that they leave."""
    G, W = np.asarray(importance, dtype=np.float64), np.asarray(sizes, dtype=np.int64)
    kept = np.zeros(len(W), dtype=bool) if always is None else np.array(always, dtype=bool)
    return np.nan_to_num(G), W, kept, math.floor(capacity) - int(W[kept].sum())


def _by_ratio(G: Floats, W: Ints) -> Ints:
    return np.lexsort((W, -G / np.maximum(W, 1)))


def _greedy(G: Floats, W: Ints, room: int) -> Bool:
    kept = np.zeros(len(G), dtype=bool)
    for block in _by_ratio(G, W):
        if W[block] <= room:
            kept[block] = True
            room -= W[block]
    return kept


def _exact(G: Floats, W: Ints, room: int) -> Bool:
    order = _by_ratio(G, W)
    best = float(G[_greedy(G, W, room)].sum())
    slack = 1e-12 * float(G.sum())  # float sums in another order differ by so much
    w, v = np.zeros(1, dtype=np.int64), np.zeros(1)  # sizes and importances of partial sums
    merged: list[tuple[Ints, Ints, Ints]] = []
    for size in np.unique(W)[::-1]:
        rest = order[W[order] <= size]
        if W[rest].sum() <= room - w[-1]:
            break  # all other blocks fit
        alike = rest[W[rest] == size]  # most important first
        rest = rest[W[rest] < size]
        values = np.concatenate([[0.0], np.cumsum(G[alike])])
        counts = np.arange(len(values))
        new_w, new_v = (w[:, None] + size * counts).ravel(), (v[:, None] + values).ravel()
        left = room - new_w
        # The rest can add at least the blocks before the first one that doesn't fit, at most a
        # fraction of that one, too.
        sum_w = np.concatenate([[0], np.cumsum(W[rest])])
        sum_v = np.concatenate([[0.0], np.cumsum(G[rest])])
        fits = left >= 0
        least = new_v + sum_v[np.searchsorted(sum_w, left, side="right") - 1]
        best = max(best, float(least[fits].max()))
        hopeful = fits & (new_v + np.interp(left, sum_w, sum_v) >= best - slack)
        at = np.flatnonzero(hopeful)
        at = at[np.lexsort((-new_v[at], new_w[at]))]
        highest = np.maximum.accumulate(new_v[at])
        at = at[np.concatenate([[True], new_v[at][1:] > highest[:-1]])]
        merged.append((alike, at // len(counts), at % len(counts)))
        w, v = new_w[at], new_v[at]
    else:
        rest = order[:0]
    kept = np.zeros(len(G), dtype=bool)
    kept[rest] = True
    chosen = int(v.argmax())
    for alike, parents, counts in reversed(merged):
        kept[alike[: counts[chosen]]] = True
        chosen = int(parents[chosen])
    return kept
