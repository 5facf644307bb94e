"""Differential privacy of clients: clipped updates, and noise on their mean.

An update of client k is its upload minus one that changes nothing, u_k - u_0, over all float
tensors together. M clients take part, or as many on average; C is ``clip``, and sigma the noise:

    the client sends  d_k = (u_k - u_0) min(1, C / ||u_k - u_0||)
    the method gets   u_0 + sum_k d_k / M + N(0, (sigma C / M)^2)

The sum is over the clients whose updates are there, and M is the same for any number of them. Under
secure aggregation clients may add the noise themselves (`secure.fixed_point`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import random
from ..params import Params, scale, subtract
from ..stacked import weighted_sum
from .chain import Link, UploadContext
from .norms import norm

_BELOW = 1 - 1e-6  # so that rounding never takes a norm above the bound


@dataclass(frozen=True)
class Private(Link):
    """Clips updates to ``clip``, at the client and again at the server, and adds noise of a
    standard deviation of ``std`` to the sum of a ``cohort`` of them, divided by its usual size. Its
    draws depend on the server's seed, the round and the ``method``. 0: none."""

    clip: float
    std: float
    cohort: int
    method: str

    def send(self, upload: Params, at: UploadContext) -> Params:
        unchanged = at.unchanged(upload)
        return clipped(subtract(upload, unchanged), self.clip)

    def receive(self, upload: Params, at: UploadContext) -> Params:
        return clipped(upload, self.clip)

    def total(self, uploads: Params, at: UploadContext) -> Params:
        rows = len(next(iter(uploads.values())))  # of the updates, or of their mean
        each = len(at.clients) / (rows * self.cohort)
        mean = weighted_sum(uploads, torch.full((rows,), each, dtype=torch.float64))
        unchanged = at.unchanged(mean)
        draws = random.generator(at.seed, at.round, "privacy", self.method)
        noised: Params = {}
        for name in sorted(mean):
            value = mean[name]
            sum_ = unchanged[name].to(value.device).double() + value.double()
            if self.std:
                noise = torch.from_numpy(self.std * draws.standard_normal(tuple(value.shape)))
                sum_ += noise.to(value.device)
            noised[name] = sum_.to(value.dtype)[None]
        return noised


def clipped(update: Params, bound: float) -> Params:
    """An update of float tensors, scaled down to a norm of ``bound`` where it is longer; one that
    is not finite becomes 0.

    >>> clipped({"w": torch.tensor([3.0, 4.0])}, 10.0)["w"].tolist()
    [3.0, 4.0]
    >>> [round(x, 5) for x in clipped({"w": torch.tensor([3.0, 4.0])}, 1.0)["w"].tolist()]
    [0.6, 0.8]
    """
    length = norm(update.values())
    if length <= bound:
        return update
    if not length < float("inf"):
        return {name: torch.zeros_like(value) for name, value in update.items()}
    share = _BELOW * bound / length
    return scale(update, share)
