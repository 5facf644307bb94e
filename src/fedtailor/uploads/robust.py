"""Robust aggregation: what a rule leaves of a cohort's uploads, or makes of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import random
from ..errors import InputError
from ..params import Params, pick
from ..stacked import (
    column_chunks,
    directions_from,
    squared_distances,
    squared_distances_from,
    weighted_sum,
    weighted_sums,
)
from .chain import Link, UploadContext
from .collected import Uploads
from .norms import clip
from .rules import Robust, krum_scores


@dataclass
class RobustRule(Link):
    """Selects uploads once all are there, or makes one of all, for the ``method`` of that name."""

    robust: Robust
    method: str

    needs = "stack"

    def check(self, present: int) -> None:
        self.robust.among(present)

    def gather(self, uploads: Uploads, at: UploadContext) -> dict[int, str | None]:
        if self.robust.makes_one:
            return {}
        rule, floats, _ = self._changed(uploads.params, at)
        rows = rule.select(at.updates(floats))
        uploads.params.update(floats)
        everyone = {*range(len(at.clients))}
        return {} if rows is None else dict.fromkeys(everyone - {*rows.tolist()})

    def total(self, uploads: Params, at: UploadContext) -> Params:
        if not self.robust.makes_one:
            return uploads
        rule, floats, state = self._changed(uploads, at)
        scored = list(at.updates(floats))
        if rule.combines:
            one = combined(rule, floats, state, scored)
        else:  # buckets
            rows = rule.select(pick(floats, scored))
            kept = floats if rows is None else {name: value[rows] for name, value in floats.items()}
            count = len(next(iter(kept.values())))
            one = weighted_sum(kept, torch.full((count,), 1 / count))
        return {name: value[None] for name, value in one.items()}

    def _changed(self, params: Params, at: UploadContext) -> tuple[Robust, Params, Params]:
        """The rule for as many uploads as are there, their float tensors after the steps before it,
        and the server's own state where distances from it count."""
        rule = self.robust.among(len(at.clients))
        self.note = None
        if rule.attackers < self.robust.attackers:
            self.note = (
                f"{len(at.clients)} of {at.drawn} uploads are there: the rule withstands "
                f"{rule.attackers} false ones, not {self.robust.attackers}"
            )
        floats = {name: value for name, value in params.items() if value.is_floating_point()}
        if "nnm" in rule.before and len(floats) < len(params):
            raise InputError(
                f"robust.before has 'nnm', which takes means, and {self.method} also sends "
                f"{min(params.keys() - floats.keys())}, which has none; allowed: 'clip'"
            )
        state = {}
        if rule.needs_state:
            own = at.unchanged({name: value[0] for name, value in floats.items()})
            state = {name: value.to(floats[name].device) for name, value in own.items()}
        # running statistics would drown what clients ask for: they are far larger than updates
        scored = list(at.updates(floats))
        for name in floats.keys() & set(at.statistics):
            floats[name] = rule.bound(floats[name])
        key = random.key(at.seed, at.round, "aggregate")
        order = random.uniform(key, (len(at.clients),)).argsort()
        return rule, changed(rule, floats, state, scored, list(at.scaled(floats)), order), state


def changed(
    robust: Robust,
    uploads: Params,
    state: Params,
    scored: Collection[str],
    scaled: Collection[str],
    order: Tensor,
) -> Params:
    """``uploads`` ``[c, ...]``, which may be changed in place, after the steps ``robust.before``:
    as many, or with bucketing as many as buckets, which are filled in the random ``order``, int64
    ``[c]``. The distances of the tensors ``scored`` count. Clip multiplies those ``scaled``, and
    alone reads ``state``, the server's own as an upload."""
    for step in robust.before:
        counting = pick(uploads, scored)
        if step == "clip":
            _clip(pick(uploads, scaled), counting, state, robust.radius)
            continue
        if step == "nnm":
            d2 = squared_distances(counting)
            size = len(d2) - min(robust.attackers, len(d2) - 1)
            nearest = d2.argsort(dim=1, stable=True)[:, :size]
            weights = torch.zeros_like(d2).scatter_(1, nearest, 1 / size)
        else:
            groups = torch.split(order, robust.bucket)
            weights = torch.zeros(len(groups), len(order), dtype=torch.float64)
            for row, group in zip(weights, groups, strict=True):
                row[group] = 1 / len(group)
        uploads = {name: weighted_sums(value, weights) for name, value in uploads.items()}
    return uploads


def _clip(uploads: Params, counting: Params, state: Params, radius: float | None) -> None:
    """Bring each upload to a distance of at most ``radius`` from the server's own state."""
    distances = squared_distances_from(counting, state).sqrt()
    bound = distances.median() if radius is None else torch.tensor(radius).to(distances)
    for row in (distances > bound).nonzero().flatten().tolist():
        upload = {name: value[row] for name, value in uploads.items()}
        clip(upload, state, (bound / distances[row]).item())


def combined(robust: Robust, uploads: Params, state: Params, scored: Collection[str]) -> Params:
    """One upload, by name ``[...]``, of ``uploads`` ``[c, ...]``: what one of `rules.COMBINATIONS`
    makes of them. ``state`` is the server's own state as an upload, for centred-clipping; the
    distances of the tensors ``scored`` count."""
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
