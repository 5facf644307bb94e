"""Local training on the values of kept blocks alone (pFedGate)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ... import random
from ...optim import ClientContext, Optimiser, scalar, without_padding
from ...params import Batch, Params, flat, pick, unflat
from ...profiling import phase
from ...task.task import Task
from .blocks import Blocks
from .choice import Choice
from .forward import adapted, select

Gating = Callable[[Params, Batch], tuple[Tensor, Choice, Params]]
"""From a state and a batch: the gates M' ``[L]``, which blocks are kept, and new values of state
buffers."""


def train_sparse(
    task: Task,
    blocks: Blocks,
    state: Params,
    batches: Sequence[Batch],
    context: ClientContext,
    sgd: Optimiser,
    lr_gate: float,
    gating: Gating,
) -> tuple[Params, Tensor]:
    """Train the gating layer, and of the model the blocks that each batch keeps.

    It gives what `optim.train` would with gates of 0 for the blocks that a batch drops. But those
    blocks are in no product, no gradient, no norm and no optimiser's step.

    Args:
        task: its model has the layers from `gate_rows`.
        blocks: the model's parameters and how each is cut. All other trained parameters are the
            gating layer's.
        state: the parameters and any other tensors of one client, not under ``torch.func.vmap``.
        batches, context: as of `optim.train`.
        sgd: plain SGD, without momentum; its ``lr`` is the blocks' learning rate.
        lr_gate: the gating layer's learning rate.
        gating: what is kept has to be known in Python.

    Returns:
        The new state, and the mean loss over the steps (scalar).
    """
    start, losses = state, list[Tensor]()
    gate_state = pick(state, (n for n in state if n in task.trained and n not in blocks.names))
    phi, moved = flat(gate_state), dict[int, Tensor]()  # the values of trained blocks, by number
    eta_g, eta = (scalar(phi, rate * context.lr_scale) for rate in (sgd.lr, lr_gate))
    batches = without_padding(batches)
    for step, batch in enumerate(batches):
        key, rise = random.fold_in(context.key, step), context.rise(step, len(batches))
        gate = {name: value.requires_grad_() for name, value in unflat(phi, gate_state).items()}
        with phase("forward"), torch.enable_grad():
            gates, choice, statistics = gating({**state, **gate}, batch)
            assert choice.known is not None
            selection = select(task.model, blocks, choice.known)
            values = blocks.join(selection.numbers, start, moved).requires_grad_()
            theta = adapted(task.model, blocks, state, gates, selection, values)
            loss, buffers = task.loss(theta, batch, key)
        with phase("backward"):
            leaves = [values, *gate.values()]
            g, *slopes = torch.autograd.grad(loss, leaves, materialize_grads=True)
        with phase("optimiser"):
            g, g_phi = sgd.clipped([g, flat(dict(zip(gate, slopes, strict=True)))])
            (stepped,) = sgd.step(g, eta_g * rise, (values.detach(),))
            (phi,) = sgd.step(g_phi, eta * rise, (phi,))
        parts = blocks.split(selection.numbers, stepped)
        moved |= {number: part.clone() for number, part in parts.items()}
        new = {**statistics, **buffers}
        state = {**state, **{n: v.detach() for n, v in new.items() if n in state}}
        losses.append(loss.detach())
    mean = torch.stack(losses).mean() if losses else phi.new_zeros(())
    return {**state, **unflat(phi, gate_state), **blocks.whole(start, moved)}, mean
