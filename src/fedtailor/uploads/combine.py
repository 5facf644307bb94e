"""Rules that make one upload of a cohort's: medians and means that leave outliers out."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from ..params import Params, pick
from ..stacked import column_chunks, directions_from, squared_distances, weighted_sum
from .rules import Robust, krum_scores


def combined(robust: Robust, uploads: Params, state: Params, scored: Collection[str]) -> Params:
    """What a rule makes of the uploads.

    Args:
        robust: one of the rules `rules.COMBINATIONS`, f and its settings.
        uploads: stacked ``[c, ...]``.
        state: the server's own state as an upload, by name ``[...]``; read by centred-clipping.
        scored: the names of the tensors whose distances count.

    Returns:
        One upload, by name ``[...]``.
    """
    f, counting = robust.attackers, pick(uploads, scored)
    if robust.rule == "geometric-median":
        return weighted_sum(uploads, _geometric_median_weights(counting, robust.steps))
    if robust.rule == "centred-clipping":
        weights = _centred_clipping_weights(counting, state, robust.radius, robust.steps)
        rest = 1 - float(weights.sum())
        total = weighted_sum(uploads, weights)
        return {n: (v + rest * state[n].to(v)).to(v.dtype) for n, v in total.items()}
    if robust.rule == "bulyan":
        rows = _bulyan_rows(squared_distances(counting), f)
        chosen = {name: value[rows.to(value.device)] for name, value in uploads.items()}
        return {n: _by_coordinate("meamed", v, 2 * f) for n, v in chosen.items()}
    return {name: _by_coordinate(robust.rule, value, f) for name, value in uploads.items()}


def _by_coordinate(rule: str, stacked: Tensor, f: int) -> Tensor:
    """The rule for every coordinate of ``[c, ...]`` by itself.

    >>> x = torch.tensor([[1.0], [2.0], [4.0], [99.0]])
    >>> [_by_coordinate(rule, x, 1).item() for rule in ("median", "trimmed-mean", "meamed")]
    [3.0, 3.0, 2.3333332538604736]
    """
    parts = [_of_columns(rule, chunk, f) for chunk in column_chunks(stacked, torch.float64)]
    return torch.cat(parts).to(stacked.dtype).view(stacked.shape[1:])


def _of_columns(rule: str, chunk: Tensor, f: int) -> Tensor:
    c = len(chunk)
    ordered = chunk.sort(0).values
    if rule == "trimmed-mean":
        return ordered[f : c - f].mean(0)
    median = (ordered[(c - 1) // 2] + ordered[c // 2]) / 2
    if rule == "median":
        return median
    nearest = (ordered - median).abs().argsort(dim=0, stable=True)[: c - f]
    return ordered.gather(0, nearest).mean(0)


def _geometric_median_weights(uploads: Params, steps: int) -> Tensor:
    """The weights, float64 ``[c]``, of the geometric median z = sum_i w_i u_i, by Weiszfeld's
    iteration w_i ~ 1 / max(||u_i - z||, nu), of sum 1. Nu is 1e-6 of a median distance; at first
    w_i ~ 1 / the median distance of u_i from the others."""
    apart = squared_distances(uploads).sqrt().median(1).values  # of a far one: far
    start = int(apart.argmin())
    r, products = directions_from(uploads, {n: value[start] for n, value in uploads.items()})
    nu = (1e-6 * r.median()).clamp(min=1e-30)
    weights = 1 / apart.clamp(min=nu)
    weights = weights / weights.sum()
    for _ in range(steps):
        weights = 1 / _distances(r, products, weights * r).clamp(min=nu)
        weights = weights / weights.sum()
    return weights


def _centred_clipping_weights(
    uploads: Params, state: Params, radius: float | None, steps: int
) -> Tensor:
    """The weights w, float64 ``[c]``, of v = state + sum_i w_i (u_i - state) after some steps of
    v <- v + mean_i (u_i - v) min(1, radius / ||u_i - v||), from the server's own state. A radius of
    None is the median distance from that."""
    r, products = directions_from(uploads, state)
    bound = r.median() if radius is None else torch.tensor(radius).to(r)
    v = torch.zeros_like(r)  # v - state, as multiples of the directions
    for _ in range(steps):
        distances = _distances(r, products, v)
        share = torch.where(distances > bound, bound / distances, 1.0) / len(r)
        v = (1 - share.sum()) * v + share * r
    return torch.where(r > 0, v / r, 0.0)


def _distances(r: Tensor, products: Tensor, of_point: Tensor) -> Tensor:
    """||u_i - z||, for a point z that is a centre plus multiples ``of_point`` ``[c]`` of the
    directions from it (`directions_from`)."""
    along = products @ of_point
    return (r * r - 2 * r * along + of_point @ along).clamp(min=0).sqrt()


def _bulyan_rows(d2: Tensor, attackers: int) -> Tensor:
    """Bulyan's selection: c - 2 f times the best upload by Krum among those that are left."""
    left = torch.arange(len(d2), device=d2.device)
    rows = []
    for _ in range(len(d2) - 2 * attackers):
        best = int(krum_scores(d2[left][:, left], attackers).argmin())
        rows.append(int(left[best]))
        left = left[left != left[best]]
    return torch.tensor(sorted(rows))
