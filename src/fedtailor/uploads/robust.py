"""Robust aggregation: what a rule leaves of a cohort's uploads."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import random
from ..errors import InputError
from ..params import Params, pick
from ..stacked import squared_distances, squared_distances_from, weighted_sum, weighted_sums
from .chain import Link, UploadContext
from .collected import Uploads
from .combine import combined
from .norms import clip
from .rules import Robust


@dataclass
class RobustRule(Link):
    """Selects uploads as soon as all are there, or makes one of all for the aggregate. ``method``
    is the method's name."""

    robust: Robust
    method: str

    needs = "stack"

    def check(self, present: int) -> None:
        self.robust.among(present)

    def gather(self, uploads: Uploads, at: UploadContext) -> dict[int, str | None]:
        if self.robust.makes_one:
            return {}
        rule, floats, _ = self._changed(uploads.params, at)
        rows = rule.select(pick(floats, at.updates(floats)))
        uploads.params.update(floats)
        selected = range(len(at.clients)) if rows is None else rows.tolist()
        return dict.fromkeys(set(range(len(at.clients))).difference(selected))

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
    """The uploads after the steps ``robust.before``.

    Args:
        robust: the steps and their settings.
        uploads: stacked ``[c, ...]``; they may be changed in place.
        state: the server's own state as an upload, by name ``[...]``; read by clip alone.
        scored: the names of the tensors whose distances count.
        scaled: those of the tensors that clip multiplies.
        order: a random order of the uploads, int64 ``[c]``, for bucketing.

    Returns:
        ``[m, ...]`` by name; m is c, or with bucketing the number of buckets.
    """
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
