"""Differential privacy of clients: clipped updates, and noise on their mean.

An update of client k is its upload minus one that changes nothing, u_k - u_0, over all float
tensors together. M clients take part, or as many on average; C is ``clip``, and sigma the noise:

    the client sends  d_k = (u_k - u_0) min(1, C / ||u_k - u_0||)
    the method gets   u_0 + sum_k d_k / M + N(0, (sigma C / M)^2)

The sum is over the clients whose updates are there, and M is the same for any number of them. Under
secure aggregation clients may add the noise themselves (`secure.fixed_point`).

With a quantile gamma C moves (G. Andrew, O. Thakkar, H. B. McMahan, S. Ramaswamy. Differentially
Private Learning with Adaptive Clipping. NeurIPS 2021). Beside d_k client k sends b_k = 1/2 if
||u_k - u_0|| <= C, else -1/2, and sigma is larger than without (`accounting`):

    share  s = 1/2 + (sum_k b_k + N(0, sigma_b^2)) / M
    next   C' = C exp(-eta (s - gamma)),  eta = 0.2

Differs from the paper: sigma_b may be more than M / 20, and no noise moves C by more than e^eta.
b_k travels times 2 h, h = sigma C / (2 sigma_b), so that it takes the same noise as an update's
value. A client that is missing counts as half of one, as M is fixed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .. import random
from ..params import Params, scale, subtract
from ..stacked import weighted_sum
from .chain import Link, UploadContext
from .norms import norm

WITHIN = "within the clip"  # beside the tensors of an update, where the clip moves
RATE = 0.2  # eta, as the paper recommends
_BELOW = 1 - 1e-6  # so that rounding never takes a norm above the bound
_LEAST = 1e-12  # of a clip, where nobody changes anything


@dataclass
class Private(Link):
    """Clips updates to ``clip``, at the client and again at the server, and adds ``noise`` (sigma,
    or 0) to the sum of a ``cohort`` of them, divided by its usual size. Its draws depend on the
    server's seed, the round and the ``method``. With a ``quantile`` the clip moves at the end of a
    round, up to ``most``; ``count_noise`` is sigma_b."""

    clip: float
    noise: float
    cohort: int
    method: str
    quantile: float | None = None
    count_noise: float = 1.0
    most: float = 1e12
    share: float | None = field(default=None, init=False)  # of updates within the clip, noised

    @property
    def clip_now(self) -> float | None:
        return None if self.quantile is None else self.clip

    def send(self, upload: Params, at: UploadContext) -> Params:
        update = subtract(upload, at.unchanged(upload))
        clip = self.clip if at.clip is None else at.clip
        sent = clipped(update, clip)
        if self.quantile is None:
            return sent
        return sent | self._bit(clip, norm(update.values()) <= clip, sent)

    def receive(self, upload: Params, at: UploadContext) -> Params:
        if self.quantile is None:
            return clipped(upload, self.clip)
        update = {name: value for name, value in upload.items() if name != WITHIN}
        return clipped(update, self.clip) | self._bit(self.clip, bool(upload[WITHIN] > 0), update)

    def total(self, uploads: Params, at: UploadContext) -> Params:
        rows = len(next(iter(uploads.values())))  # of the updates, or of their mean
        each = len(at.clients) / (rows * self.cohort)
        mean = weighted_sum(uploads, torch.full((rows,), each, dtype=torch.float64))
        bit = mean.pop(WITHIN, None)
        unchanged = at.unchanged(mean)
        draws = random.generator(at.seed, at.round, "privacy", self.method)
        std = self.noise * self.clip / self.cohort
        noised: Params = {}
        for name in sorted(mean):
            value = mean[name]
            sum_ = unchanged[name].to(value.device).double() + value.double()
            if std:
                noise = torch.from_numpy(std * draws.standard_normal(tuple(value.shape)))
                sum_ += noise.to(value.device)
            noised[name] = sum_.to(value.dtype)[None]
        if bit is not None:
            centred = float(bit) + std * float(draws.standard_normal())
            self.share = 0.5 + centred / (2 * self._half(self.clip))
        return noised

    def close(self, clients: Sequence[int]) -> tuple[float, ...]:
        if self.share is not None and self.quantile is not None:
            over = min(max(self.share - self.quantile, -1.0), 1.0)
            self.clip = min(max(self.clip * math.exp(-RATE * over), _LEAST), self.most)
            self.share = None
        return ()

    def _half(self, clip: float) -> float:
        """h."""
        return self.noise * clip / (2 * self.count_noise)

    def _bit(self, clip: float, is_within: bool, like: Params) -> Params:
        half = self._half(clip) if is_within else -self._half(clip)
        return {WITHIN: torch.tensor(half, device=next(iter(like.values())).device)}


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
