"""Distances between a cohort's uploads, exact also where one of them is 1e20 times the others.

Differences are taken before they are squared or scaled: products of the uploads themselves would
round away what is small.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..params import Params
from ..stacked import column_chunks


def squared_distances_from(uploads: Params, centre: Params) -> Tensor:
    """||u_i - centre||^2, float64 ``[c]``; ``centre`` has tensors ``[...]`` by name."""
    first = next(iter(uploads.values()))
    total = torch.zeros(len(first), dtype=torch.float64, device=first.device)
    for difference in _differences(uploads, centre):
        total += torch.linalg.vecdot(difference, difference)
    return total


def directions_from(uploads: Params, centre: Params) -> tuple[Tensor, Tensor]:
    """How far the uploads are from a centre, and the products of their directions.

    Args:
        uploads: stacked ``[c, ...]``.
        centre: tensors ``[...]`` by name.

    Returns:
        r_i = ||u_i - centre||, float64 ``[c]``; <e_i, e_j> for e_i = (u_i - centre) / r_i (0 where
        r_i is 0), float64 ``[c, c]``.
    """
    r = squared_distances_from(uploads, centre).sqrt()
    products = torch.zeros(len(r), len(r), dtype=torch.float64, device=r.device)
    scale = torch.where(r > 0, 1 / r, 0.0)[:, None]
    for difference in _differences(uploads, centre):
        unit = scale * difference
        products.addmm_(unit, unit.T)
    return r, products


def _differences(uploads: Params, centre: Params) -> Iterator[Tensor]:
    for name, value in uploads.items():
        row, start = centre[name].reshape(-1), 0
        for chunk in column_chunks(value, torch.float64):
            stop = start + chunk.shape[1]
            yield chunk - row[start:stop].to(chunk)
            start = stop
