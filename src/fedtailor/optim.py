"""Local training: one optimiser step a batch. Only this module knows which steps are padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal, NamedTuple

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor

from . import random
from .params import Batch, Params, add, flat, pick, scale, split, strip_prefix, subtract, unflat
from .profiling import phase
from .task.records import RecordNoise, noised_gradient
from .task.task import Task
from .torch_private import under_vmap

MAY_MOVE = "may move."
"""The prefix under which a `Loss` names parameters that stay as they are in its step."""

LearningRate = Annotated[float, Gt(0), Le(1e6)]
Passes = Annotated[int, Gt(0), Le(10_000)]  # over a client's data

Loss = Callable[[Params, Batch, Tensor], tuple[Tensor, Params]]
"""From a state, a batch and a key: the loss and new values of state buffers.

Among the buffers may stand, under `MAY_MOVE` and a parameter's name, a bool tensor that broadcasts
to the parameter. Where it is False, the parameter and its momentum stay as they are in this step.
"""

OptState = tuple[Tensor, ...]
"""A group's parameters, then what the optimiser keeps of them between steps."""

_LARGE = 1 << 16  # values of a parameter that is a group of its own


class ClientContext(NamedTuple):
    """What a client is told beside its state and its batches.

    ``key`` (int64 scalar) is the client's own in this round, ``lr_scale`` the round's factor on
    learning rates, ``round`` the round's number, from 1. ``public`` holds the examples that all
    clients have, if there are any. ``passes`` says how many passes over the client's data its
    batches are. A step is computed on ``micro_batch`` examples at a time; None: on all at once.
    Over the steps of a training the factor rises by ``lr_slope`` of ``lr_scale``, its mean.
    Where a GPU records the training to play it again, these two are float64 scalar tensors.
    With ``noise`` every gradient is that of `noised_gradient`.
    """

    key: Tensor
    lr_scale: float | Tensor = 1.0
    round: int = 1
    public: Batch | None = None
    passes: int = 1
    micro_batch: int | None = None
    lr_slope: float | Tensor = 0.0
    noise: RecordNoise | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is round 1: what is asked where no tensor depends on the answer."""
        return self[2] == 1

    def subkey(self, number: int) -> ClientContext:
        """The same context with another key, for one of several trainings in a round."""
        return self._replace(key=random.fold_in(self.key, -1 - number))

    def rise(self, number: int | Tensor, steps: int | Tensor) -> float | Tensor:
        """The factor on a learning rate at step ``number``, from 0, beside its mean over so many
        ``steps``."""
        place = (number + 0.5) / steps - 0.5
        slope = self.lr_slope
        if isinstance(slope, Tensor) and isinstance(place, Tensor):
            slope = slope.to(place.dtype)  # as a number would be
        return 1 + slope * place


@dataclass(frozen=True)
class Optimiser:
    """A local optimiser and its settings; its own state starts anew each round.

    ``sgd``: v <- momentum v + g, theta <- theta - lr v. ``adam``: Kingma and Ba (ICLR 2015) with
    weight decay added to the gradient; ``adamw``: decoupled (Loshchilov and Hutter, ICLR 2019).
    """

    name: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: LearningRate = 0.01
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.0  # sgd
    weight_decay: Annotated[float, Ge(0), Le(1e6)] = 0.0
    beta1: Annotated[float, Ge(0), Lt(1)] = 0.9  # adam, adamw
    beta2: Annotated[float, Ge(0), Lt(1)] = 0.999
    eps: Annotated[float, Gt(0), Le(1)] = 1e-8
    # largest gradient norm over all trained parameters
    clip: Annotated[float, Gt(0), Le(1e6)] | None = None

    def start(self, theta: Tensor) -> OptState:
        """The state before the first step, for parameters of any shape."""
        zeros = torch.zeros_like(theta)
        if self.name == "sgd":
            return (theta, zeros) if self.momentum else (theta,)
        return (theta, zeros, zeros, theta.new_zeros(()))

    def clipped(self, gradient: Sequence[Tensor]) -> Sequence[Tensor]:
        """The gradient by group, scaled so that the norm over all groups is at most ``clip``."""
        if self.clip is None:
            return gradient
        norm = torch.stack([group.norm() for group in gradient]).norm()
        return [group * (self.clip / norm.clamp(min=self.clip)) for group in gradient]

    def step(self, g: Tensor, lr: Tensor, state: OptState) -> OptState:
        """The state after one step.

        ``g`` is the gradient, clipped before; ``lr`` the learning rate, a scalar or of the
        parameters' shape.
        """
        theta, *memory = state
        if self.weight_decay and self.name != "adamw":
            g = torch.add(g, theta, alpha=self.weight_decay)
        if self.name == "sgd":
            v = torch.add(g, memory[0], alpha=self.momentum) if self.momentum else g
            moved = torch.addcmul(theta, v, lr, value=-1)
            return (moved, v) if self.momentum else (moved,)
        m, v, t = memory
        t = t + 1
        m = torch.lerp(g, m, self.beta1)
        v = torch.lerp(g * g, v, self.beta2)
        if self.name == "adamw":
            theta = theta * (1 - lr * self.weight_decay)
        size = lr / (1 - self.beta1**t)
        root = v.sqrt() * (1 - self.beta2**t).rsqrt()
        return torch.addcdiv(theta, m * size, root + self.eps, value=-1), m, v, t


class ParamGroups:
    """The parameters as an optimiser sees them.

    All small parameters are one group, a vector, so that a step takes few operations however many
    parameters there are. A large one is a group of its own, since copying it would cost more.
    """

    def __init__(self, like: Params) -> None:
        self._large = {name: v for name, v in like.items() if v.numel() >= _LARGE}
        self._small = {name: v for name, v in like.items() if name not in self._large}

    def flatten(self, params: Params) -> list[Tensor]:
        """``params`` by group."""
        small = [flat(pick(params, self._small))] if self._small else []
        return [*(params[name] for name in self._large), *small]

    def unflatten(self, groups: Sequence[Tensor]) -> Params:
        """The inverse of `flatten`."""
        large = dict(zip(self._large, groups, strict=False))
        return {**large, **unflat(groups[-1], self._small)} if self._small else large

    def rates(self, rate: Callable[[str], float], scale: float | Tensor = 1.0) -> list[Tensor]:
        """Learning rates times ``scale`` by group: a scalar, or a vector where parameters of the
        group differ."""
        large = {name: scalar(v, rate(name) * scale) for name, v in self._large.items()}
        small = {name: scalar(v, rate(name) * scale) for name, v in self._small.items()}
        if len({rate(name) for name in small}) > 1:
            small = {name: value.expand_as(self._small[name]) for name, value in small.items()}
            return [*large.values(), flat(small)]
        return [*large.values(), *list(small.values())[:1]]


def scalar(like: Tensor, value: float | Tensor) -> Tensor:
    """``value`` as a scalar tensor of the type of ``like``, made where that is."""
    return value.to(like) if isinstance(value, Tensor) else like.new_full((), value)


def train(
    task: Task,
    state: Params,
    batches: Sequence[Batch],
    context: ClientContext,
    optimiser: Optimiser,
    *,
    lr: Callable[[str], float | None] | None = None,
    penalty: Callable[[Params], Tensor] | None = None,
    loss: Loss | None = None,
) -> tuple[Params, Tensor]:
    """Minimise ``loss + penalty`` by one optimiser step a batch.

    Args:
        task: its ``trained`` names the parameters that are trained, if they are in ``state``.
        state: the parameters and any other tensors, which stay as they are; state buffers get
            their new values.
        batches: one a step. A batch may hold ``weight`` ``[b]``, 0 for padding examples; a batch
            whose weights are all 0 is padding, and leaves everything as it is.
        context: ``key`` seeds dropout, ``lr_scale`` and ``lr_slope`` change the learning rates; a
            step takes ``micro_batch`` examples at a time, and the mean of their gradients.
        optimiser: starts anew.
        lr: the learning rate of a parameter by its name; None: the parameter stays as it is. By
            default ``optimiser.lr`` for all.
        penalty: from the whole state to a scalar that is added to every step's loss.
        loss: by default the task's.

    Returns:
        The new state, and the mean loss over the steps (scalar), without the penalty.
    """
    measure, rate = loss or task.loss, lr or (lambda name: optimiser.lr)
    theta, rest = split(state, lambda name: name in task.trained and rate(name) is not None)
    if not theta:
        return state, torch.zeros((), device=task.device)
    groups = ParamGroups(theta)
    rates = groups.rates(lambda name: rate(name) or 0.0, context.lr_scale)

    noise, rows = context.noise, context.micro_batch

    def objective(batch: Batch, key: Tensor, theta: Params) -> tuple[Tensor, tuple[Tensor, Params]]:
        values = {**rest, **theta}
        value, buffers = measure(values, batch, key)
        whole = value if penalty is None or noise is not None else value + penalty(values)
        return whole, (value, buffers)

    def plain_gradient(
        theta: Params, batch: Batch, key: Tensor
    ) -> tuple[Params, tuple[Tensor, Params]]:
        keep = any(value.requires_grad for value in batch.values())  # of a step that is derived
        return _gradient(partial(objective, batch, key), theta, keep)

    def gradient_at(theta: Params, batch: Batch, key: Tensor) -> tuple[Params, Tensor, Params]:
        if noise is None:
            parts = task.parts(batch, rows)
            return _sum((plain_gradient(theta, part, key), share) for part, share in parts)
        g, value = noised_gradient(partial(plain_gradient, theta), batch, key, noise, rows)
        if penalty is not None:  # it tells nothing of an example, so that nothing clips it
            drift, _ = _gradient(lambda w: (penalty({**rest, **w}), (value, {})), theta)
            g = add(g, drift)
        return g, value, {}

    states = [optimiser.start(group) for group in groups.flatten(theta)]
    number: int | Tensor = 0  # of real steps before this one: padding shifts no keys
    losses, active = [], []
    for batch in batches:
        key = random.fold_in(context.key, number)
        at = groups.unflatten([theta for theta, *_ in states])
        gradient, value, buffers = gradient_at(at, batch, key)
        with phase("optimiser"):
            g = optimiser.clipped(groups.flatten(gradient))
            now = rates
            if isinstance(context.lr_slope, Tensor) or context.lr_slope:
                rise = context.rise(number, real_steps(batches))
                now = [rate * scalar(rate, rise) for rate in rates]
            new = [optimiser.step(*each) for each in zip(g, now, states, strict=True)]
        if may_move := strip_prefix(buffers, MAY_MOVE):
            masks = groups.flatten(_for_all(may_move, theta))
            new = [_where(*each) for each in zip(masks, new, states, strict=True)]
        real = torch.ones_like(value, dtype=torch.bool)
        if "weight" in batch:
            real = batch["weight"].sum() > 0
            new = [_where(real, *each) for each in zip(new, states, strict=True)]
            buffers = {n: torch.where(real, v, rest[n]) for n, v in buffers.items() if n in rest}
        active.append(real)
        losses.append(torch.where(real, value, 0.0))
        number = number + (real.long() if "weight" in batch else 1)
        states = new
        rest = {**rest, **{n: v.detach() for n, v in buffers.items() if n in rest}}
    mean = torch.stack(losses).sum() / torch.stack(active).sum().clamp(min=1)
    trained = {**rest, **groups.unflatten([theta for theta, *_ in states])}
    return pick(trained, state), mean


def _sum(
    parts: Iterator[tuple[tuple[Params, tuple[Tensor, Params]], Tensor | float]],
) -> tuple[Params, Tensor, Params]:
    """The gradient and the loss of a batch from those of its parts and their shares, and the last
    part's buffers."""
    (gradient, (value, buffers)), share = next(parts)
    if isinstance(share, Tensor):
        gradient, value = scale(gradient, share), value * share
    for (more, (loss, buffers)), share in parts:  # noqa: B007
        gradient, value = add(gradient, scale(more, share)), value + loss * share
    return gradient, value, buffers


def _gradient(
    objective: Callable[[Params], tuple[Tensor, tuple[Tensor, Params]]],
    theta: Params,
    keep: bool = False,
) -> tuple[Params, tuple[Tensor, Params]]:
    """The objective's gradient by ``theta``, and the objective's second result; with ``keep`` the
    gradient has derivatives, too.

    Plain autograd frees every activation in the backward pass, which torch.func.grad does not. Only
    inside a transform, where no tensor can be a leaf, torch.func is used.
    """
    if under_vmap():
        with phase("forward"):
            value, pull_back, second = torch.func.vjp(  # type: ignore[misc]  # three with has_aux
                objective, theta, has_aux=True
            )
        with phase("backward"):
            one = torch.ones_like(value)
            (gradient,) = pull_back(one, retain_graph=keep, create_graph=keep)
        return gradient, second
    leaves = {name: v.detach().requires_grad_() for name, v in theta.items()}
    with phase("forward"), torch.enable_grad():
        value, (loss, buffers) = objective(leaves)
    with phase("backward"):
        slopes = torch.autograd.grad(
            value, list(leaves.values()), create_graph=keep, materialize_grads=True
        )
    return dict(zip(leaves, slopes, strict=True)), (loss.detach(), buffers)


def proximal(anchor: Params, mu: float) -> Callable[[Params], Tensor]:
    """A penalty for `train`: mu/2 ||w - anchor||^2 over the names of ``anchor``."""

    def penalty(w: Params) -> Tensor:
        drift = flat(subtract(pick(w, anchor), anchor))
        return mu / 2 * drift.square().sum()

    return penalty


def with_gradient(value: Tensor, theta: Params, gradient: Params) -> Tensor:
    """``value`` with ``gradient`` as its derivative by ``theta``.

    For a loss of `train` that computes its gradient by itself; it can't be differentiated twice.
    """
    term = (flat(theta) * flat(gradient).detach()).sum()
    return value.detach() + (term - term.detach())


def real_steps(batches: Sequence[Batch]) -> Tensor | int:
    """How many of ``batches`` are no padding."""
    padded = [batch["weight"].sum() > 0 for batch in batches if "weight" in batch]
    return len(batches) - len(padded) + (torch.stack(padded).sum() if padded else 0)


def batches_of_passes(batches: Sequence[Batch], context: ClientContext, passes: int) -> list[Batch]:
    """The batches of so many ``passes`` over the client's data; ``batches``, of which there are
    ``context.passes``, are used as often as needed."""
    whole, rest = divmod(passes, context.passes)
    if rest == 0:
        return list(batches) * whole
    part = list(batches[: -(-rest * len(batches) // context.passes)])
    if "weight" in batches[0]:  # padding comes last, but clients have different numbers of batches
        end = rest * real_steps(batches) // context.passes
        part = [{**b, "weight": b["weight"] * (at < end)} for at, b in enumerate(part)]
    return list(batches) * whole + part


def without_padding(batches: Sequence[Batch]) -> list[Batch]:
    """The batches that are no padding; not under ``torch.func.vmap``, where Python can't tell."""
    return [batch for batch in batches if "weight" not in batch or bool(batch["weight"].sum() > 0)]


def _for_all(masks: Params, theta: Params) -> Params:
    """A mask for each parameter, bool of its shape; True for those that ``masks`` doesn't name."""
    free = torch.ones((), dtype=torch.bool, device=next(iter(theta.values())).device)
    return {name: masks.get(name, free).expand_as(v) for name, v in theta.items()}


def _where(mask: Tensor, new: OptState, old: OptState) -> OptState:
    """``new`` where ``mask`` is True, else ``old``. The mask is a scalar or of the parameters'
    shape; in the latter case counters, which are scalars, are the new ones."""
    pairs = zip(new, old, strict=True)
    return tuple(torch.where(mask, n, o) if mask.dim() <= n.dim() else n for n, o in pairs)
