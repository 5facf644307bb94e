"""Changes of a cohort's uploads before a rule: clipping, nearest-neighbour mixing, bucketing."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from ..params import Params, pick
from ..stacked import squared_distances, weighted_sums
from .distances import squared_distances_from
from .norms import clip
from .rules import Robust


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
