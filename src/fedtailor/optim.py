"""Local training: a scan over steps. The only place that knows which steps are padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from . import random
from .params import Params, flat, split, subtract, unflat
from .task import Batch, Task

Loss = Callable[[Params, Batch, Tensor], tuple[Tensor, Params]]


class Context(NamedTuple):
    """What a client is told beside its state and batches: its own random ``key`` (int64 scalar),
    the round's learning-rate factor, the round's number (from 1), and the examples that everybody
    has, if there are any."""

    key: Tensor
    lr_scale: float = 1.0
    round: int = 1
    public: Batch | None = None

    def phase(self, number: int) -> Context:
        """The same context with a key of its own, for one of several trainings in a round."""
        return self._replace(key=random.fold_in(self.key, -1 - number))


@dataclass(frozen=True)
class Optimiser:
    """A local optimiser and its settings; its own state starts anew each round.

    ``sgd``: v <- momentum v + g, theta <- theta - lr v. ``adam``: Kingma and Ba (ICLR 2015) with
    weight decay added to the gradient; ``adamw``: decoupled (Loshchilov and Hutter, ICLR 2019).
    """

    name: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: Annotated[float, Gt(0)] = 0.01
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.0  # sgd
    weight_decay: Annotated[float, Ge(0)] = 0.0
    beta1: Annotated[float, Ge(0), Lt(1)] = 0.9  # adam, adamw
    beta2: Annotated[float, Ge(0), Lt(1)] = 0.999
    eps: Annotated[float, Gt(0)] = 1e-8
    clip: Annotated[float, Gt(0)] | None = None  # largest gradient norm over all trained parameters

    def start(self, theta: Tensor) -> tuple[Tensor, ...]:
        """The state before the first step, for a parameter vector ``[P]``."""
        zeros = torch.zeros_like(theta)
        if self.name == "sgd":
            return (zeros,) if self.momentum else ()
        return (zeros, zeros, theta.new_zeros(()))

    def step(
        self, theta: Tensor, g: Tensor, lr: Tensor, state: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One step from parameters ``theta`` ``[P]`` with gradient ``g`` ``[P]`` and learning rates
        ``lr`` ``[P]``; the new parameters and state."""
        if self.clip is not None:
            g = g * (self.clip / g.norm().clamp(min=self.clip))
        if self.weight_decay and self.name != "adamw":
            g = g + self.weight_decay * theta
        if self.name == "sgd":
            v = self.momentum * state[0] + g if self.momentum else g
            return theta - lr * v, (v,) if self.momentum else ()
        m, v, t = state
        t = t + 1
        m = torch.lerp(g, m, self.beta1)
        v = torch.lerp(g * g, v, self.beta2)
        if self.name == "adamw":
            theta = theta * (1 - lr * self.weight_decay)
        unbiased_m = m / (1 - self.beta1**t)
        unbiased_v = v / (1 - self.beta2**t)
        return theta - lr * unbiased_m / (unbiased_v.sqrt() + self.eps), (m, v, t)


def train(
    task: Task,
    state: Params,
    steps: Sequence[Batch],
    context: Context,
    optimiser: Optimiser,
    *,
    lr: Callable[[str], float] | None = None,
    penalty: Callable[[Params], Tensor] | None = None,
    only: Callable[[str], bool] | None = None,
    loss: Loss | None = None,
    mask: Callable[[Params], Params] | None = None,
    taken: int | Tensor = 0,
) -> tuple[Params, Tensor]:
    """Minimise the task's loss plus ``penalty(state)``, one optimiser step a batch.

    Args:
        state: all the task's tensors and any others; what is not in ``task.trained`` is carried
            along, state buffers with their new values.
        steps: one batch a step. A batch may hold ``weight`` ``[b]``, 0 for padding examples; one
            whose weights are all 0 leaves everything unchanged.
        lr: learning rate of a parameter by its name; by default ``optimiser.lr`` for all.
        penalty: a scalar added to every step's loss; it sees the whole state.
        only: the names to train; by default all. The others stay as they are.
        loss: instead of ``task.loss``: from (state, batch, key) the loss and new state buffers.
        mask: from a step's new state buffers, bool tensors by parameter name, each broadcast to its
            parameter: where False, the parameter and its momentum are left alone in this step.
        taken: steps of the same training that were taken before; keys go on from there.

    Returns:
        The new state and the mean loss over the steps, without the penalty (scalar).
    """
    measure = loss or task.loss
    theta, rest = split(state, lambda n: n in task.trained and (only is None or only(n)))
    if not theta:
        return state, torch.zeros(())
    rate = lr or (lambda name: optimiser.lr)
    rates = flat({n: torch.full_like(v, rate(n) * context.lr_scale) for n, v in theta.items()})

    def objective(theta: Params, batch: Batch, key: Tensor) -> tuple[Tensor, tuple[Tensor, Params]]:
        values = {**rest, **theta}
        value, buffers = measure(values, batch, key)
        return value + penalty(values) if penalty else value, (value, buffers)

    gradient = torch.func.grad(objective, has_aux=True)
    vector = flat(theta)
    memory = optimiser.start(vector)
    losses, active = [], []
    for batch in steps:
        # by real steps so far: padding before a second pass shifts no keys
        key = random.fold_in(context.key, taken)
        gradients, (value, buffers) = gradient(unflat(vector, theta), batch, key)
        new_vector, new_memory = optimiser.step(vector, flat(gradients), rates, memory)
        if mask is not None:
            moves = _mask(mask(buffers), theta)
            new_vector = torch.where(moves, new_vector, vector)
            new_memory = _where(moves, new_memory, memory)
        real = _is_real(batch, value)
        active.append(real)
        losses.append(torch.where(real, value, 0.0))
        taken = taken + (real.long() if "weight" in batch else 1)
        if "weight" in batch:
            vector = torch.where(real, new_vector, vector)
            memory = tuple(torch.where(real, n, o) for n, o in zip(new_memory, memory, strict=True))
            buffers = {n: torch.where(real, v, rest[n]) for n, v in buffers.items() if n in rest}
        else:
            vector, memory = new_vector, new_memory
        rest = {**rest, **{n: v.detach() for n, v in buffers.items() if n in rest}}
    mean = torch.stack(losses).sum() / torch.stack(active).sum().clamp(min=1)
    trained = {**rest, **unflat(vector, theta)}
    return {name: trained[name] for name in state}, mean


def proximal(anchor: Params, mu: float) -> Callable[[Params], Tensor]:
    """A penalty for `train`: mu/2 ||w - anchor||^2 over the names of ``anchor``."""

    def penalty(w: Params) -> Tensor:
        drift = flat(subtract({name: w[name] for name in anchor}, anchor))
        return mu / 2 * drift.square().sum()

    return penalty


def with_gradient(value: Tensor, theta: Params, gradient: Params) -> Tensor:
    """``value``, whose derivative by ``theta`` is made to be ``gradient``.

    For a loss of `train` that works its own step out; neither is differentiated further.
    """
    term = (flat(theta) * flat(gradient).detach()).sum()
    return value.detach() + (term - term.detach())


def real_steps(steps: Sequence[Batch]) -> Tensor | int:
    """How many of ``steps`` are a client's own, and no padding."""
    padded = [batch["weight"].sum() > 0 for batch in steps if "weight" in batch]
    return len(steps) - len(padded) + (torch.stack(padded).sum() if padded else 0)


def _mask(free: Params, theta: Params) -> Tensor:
    """bool ``[P]``: what may move; parameters that ``free`` does not name all may."""
    everything = torch.ones((), dtype=torch.bool, device=next(iter(theta.values())).device)
    return flat({name: free.get(name, everything).expand_as(v) for name, v in theta.items()})


def _where(moves: Tensor, new: tuple[Tensor, ...], old: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """An optimiser's vectors ``[P]`` where ``moves``; its counters always are the new ones."""
    pairs = zip(new, old, strict=True)
    return tuple(torch.where(moves, n, o) if n.shape == moves.shape else n for n, o in pairs)


def _is_real(batch: Batch, like: Tensor) -> Tensor:
    """Whether a step is one of the client's own, bool scalar."""
    if "weight" not in batch:
        return torch.ones_like(like, dtype=torch.bool)
    return batch["weight"].sum() > 0
