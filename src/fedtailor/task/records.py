"""Differential privacy of records: clipped gradients of single examples, and noise on their sum.

A step's batch B has each of the client's n records with probability q, independent of the others;
b = q n is its size on average. C is ``clip``, and ``std`` sigma C. All tensors that are trained
count together in a norm:

    g_i = gradient of the loss of example i
    g   = ( sum_{i in B} g_i min(1, C / ||g_i||) + N(0, (sigma C)^2) ) / b

M. Abadi, A. Chu, I. Goodfellow, H. B. McMahan, I. Mironov, K. Talwar, L. Zhang. Deep Learning with
Differential Privacy. CCS 2016.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from .. import random
from ..errors import InputError
from ..params import DRAWN, Batch, Params

_BELOW = 1 - 1e-6  # so that rounding never takes a norm above the bound
_LOSS = 1e30  # the most that an example's counts as, so that sums are finite


class RecordNoise(NamedTuple):
    """What a client's steps are noised with: ``key`` (int64 scalar) is its own in this round, and
    ``size`` (float scalar) the average size of its batches."""

    key: Tensor
    size: Tensor
    clip: float
    std: float


class SampledBatch(Batch):
    """A batch whose examples a method can't see: only a step with noise takes them, and not more
    than ``uses`` times. What it shows is whether it is padding. ``number`` counts the batches of a
    round."""

    def __init__(self, batch: Batch, number: int, uses: int) -> None:
        is_real = {"weight": batch["weight"].amax(0, keepdim=True)} if "weight" in batch else {}
        super().__init__(is_real)
        self._batch, self._number, self._uses, self._taken = batch, number, uses, 0

    def take(self) -> tuple[Batch, int]:
        """The batch itself, and a number that no other noise of this client and round has."""
        if self._taken == self._uses:
            _refuse(f"takes more steps on a batch than the {self._uses} that are counted")
        self._taken += 1
        return self._batch, self._number * self._uses + self._taken - 1

    def _hidden(self, *_: Any) -> NoReturn:
        _refuse("uses examples beside the gradients of its steps, which noise does not cover")

    __missing__ = __iter__ = keys = values = items = get = _hidden


def noised_gradient(
    gradient_of: Callable[[Batch, Tensor], tuple[Params, tuple[Tensor, Params]]],
    batch: Batch,
    key: Tensor,
    noise: RecordNoise,
    rows: int | None,
) -> tuple[Params, Tensor]:
    """The gradient g of a step on a `SampledBatch`, by parameter, and the mean loss of the examples
    that were drawn, where a loss that is not finite counts as 0. ``gradient_of`` makes of a batch
    of one example, and a ``key`` by its place, a gradient, a loss and new values of buffers, of
    which there may be none; of ``rows`` examples at a time, by default of all."""
    if not isinstance(batch, SampledBatch):
        _refuse("trains on examples that are not those of a sampled batch")
    examples, number = batch.take()
    drawn = examples.get(DRAWN)  # padding has 0
    if drawn is None:
        drawn = torch.ones(len(next(iter(examples.values()))), device=key.device)
    size, sums, total = len(drawn), dict[str, Tensor](), drawn.new_zeros(())

    def one(example: Batch, place: Tensor) -> tuple[Params, Tensor]:
        alone = {name: value[None] for name, value in example.items()}
        gradient, (loss, buffers) = gradient_of(alone, random.fold_in(key, place))
        if buffers:
            _refuse("keeps statistics of its batches, which noise does not cover")
        return gradient, loss

    for first in range(0, size, rows or size):
        some = slice(first, first + (rows or size))
        places = torch.arange(size, device=drawn.device)[some]
        part = {name: value[some] for name, value in examples.items()}
        gradients, losses = torch.func.vmap(one)(part, places)
        share = _shares(list(gradients.values()), noise.clip) * drawn[some]  # [b]
        for name, g in gradients.items():
            clipped = share @ torch.where(share[:, None] > 0, g.flatten(1), 0.0)
            sums[name] = sums[name] + clipped if name in sums else clipped
        counts = (drawn[some] > 0) & losses.isfinite()  # an example's loss decides on no update
        total = total + torch.where(counts, losses.float(), 0.0).clamp(max=_LOSS).sum()
    step = random.fold_in(noise.key, number)
    made: Params = {}
    for index, (name, g) in enumerate(sorted(gradients.items())):
        shape = g.shape[1:]
        draws = random.normal(random.fold_in(step, index), tuple(shape), noise.std, torch.float64)
        made[name] = ((sums[name].view(shape) + draws) / noise.size).to(g.dtype)
    return made, total / drawn.sum().clamp(min=1)


def _shares(gradients: Sequence[Tensor], clip: float) -> Tensor:
    """By how much each example's gradient is scaled down, ``[b]``; by 0 where it is not finite."""
    norm = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0).sqrt()
    return torch.where(norm.isfinite(), _BELOW * clip / norm.clamp(min=_BELOW * clip), 0.0)


def _refuse(what: str) -> NoReturn:
    raise InputError(f"privacy.level = 'record': the method {what}; choose another method")
