"""Weights of a mixture that one client finds on its own examples."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .. import random
from ..optim import ClientContext, Optimiser
from ..params import Batch, Params

_RATE = 0.5  # of the logits, which Adam moves by about as much in the first step; it falls to 0


def mixed(bank: Params, weights: Tensor) -> Params:
    """sum_j w_j bank_j, from tensors ``[d, ...]`` by name and w ``[d]``.

    >>> mixed({"x": torch.tensor([[1.0], [3.0]])}, torch.tensor([0.5, 0.5]))
    {'x': tensor([2.])}
    """
    return {name: torch.tensordot(weights.to(v), v, 1) for name, v in bank.items()}


def fit_logits(
    logits: Tensor,
    batches: Sequence[Batch],
    context: ClientContext,
    loss: Callable[[Tensor, Batch, Tensor], Tensor],
) -> Tensor:
    """Logits a ``[d]`` whose weights softmax(a) lower a client's loss: a step of Adam a batch, at a
    rate that falls to 0.

    Args:
        logits: the start; minus infinity stays, and its weight 0.
        batches: the client's; none: the start is returned.
        context: its key is for dropout.
        loss: from weights ``[d]``, a batch and a key.

    >>> batch, context = {"x": torch.ones(1)}, ClientContext(random.key(0))
    >>> a = fit_logits(torch.zeros(2), [batch] * 9, context, lambda w, batch, key: w[0])
    >>> torch.softmax(a, 0).round(decimals=1)
    tensor([0., 1.])
    """
    free = logits.isfinite()
    optimiser = Optimiser("adam", lr=_RATE)
    state = optimiser.start(torch.where(free, logits, 0.0))
    slope = torch.func.grad(lambda a, *rest: loss(torch.softmax(a, 0), *rest))
    for number, batch in enumerate(batches):
        a = torch.where(free, state[0], -torch.inf)
        gradient = slope(a, batch, random.fold_in(context.key, number))
        rate = logits.new_full((), _RATE * (1 - number / len(batches)))
        state = optimiser.step(torch.where(free, gradient, 0.0), rate, state)
    return torch.where(free, state[0], -torch.inf)
