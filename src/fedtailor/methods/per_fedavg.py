"""Per-FedAvg: a shared model that is good after a gradient step on a client's data.

Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic Meta-Learning
Approach. A. Fallah, A. Mokhtari, A. Ozdaglar. NeurIPS 2020.

    min_w  1/n sum_k F_k(w),  F_k(w) = f_k(w - a grad f_k(w)),  a the paper's alpha
Client k, for each step, on independent batches D, D', D'':
    u   =  w_k - a grad f(w_k; D)
    g   =  grad f(u; D')
    w_k <- w_k - beta (g - a H g),  H = hess f(w_k; D'')
``form`` says what stands for H g:
    exact:          the Hessian-vector product
    hessian-free:   (grad f(w_k + delta g; D'') - grad f(w_k - delta g; D'')) / (2 delta)
    first-order:    0
Server:
    w   <- mean of the w_k

The personal model is w after steps of rate a on the client's data; it is not kept. Running
statistics of batch normalisation are those of the passes at u, and averaged. The training loss is
f(u; D').

Differs from the paper:
- One batch a step, in two halves: examples 0, 2, ... are D and D'', examples 1, 3, ... D'. Where
  the number is odd, the last example is in both.
- The personal model takes a step for every batch of ``finetune_passes`` over the client's
  data; the paper takes one step, or a few.
- The server weighs clients by their examples, as FedAvg here does.
- beta's default, the optimiser's rate, is ours; schedules scale beta alone.
- Equation numbers are left out: the paper's text could not be read here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from .. import random
from ..method import FineTuning
from ..optim import ClientContext, Optimiser, Passes, train, with_gradient
from ..params import Batch, Params, add, pick, scale, subtract
from ..task.task import Task


@dataclass(frozen=True)
class PerFedAvg(FineTuning):
    """Per-FedAvg: ``lr_inner`` is the paper's alpha, ``optimiser.lr`` its beta."""

    name: ClassVar[str] = "per-fedavg"
    takes_parts: ClassVar[bool] = False
    family: ClassVar[str] = "global"
    needs_only_mean: ClassVar[bool] = True

    form: Literal["hessian-free", "first-order", "exact"] = "hessian-free"
    lr_inner: Annotated[float, Ge(0), Le(1e6)] = 0.01
    delta: Annotated[float, Gt(0), Le(1e6)] = 1e-3  # of hessian-free
    finetune_passes: Passes = 1

    def local(
        self, task: Task, state: Params, batches: Sequence[Batch], context: ClientContext
    ) -> tuple[Params, Tensor]:
        def meta(state: Params, batch: Batch, key: Tensor) -> tuple[Tensor, Params]:
            D, D_prime = halves(batch)
            w = {name: state[name].detach() for name in task.trained}

            def f(w: Params) -> Tensor:
                return task.loss({**state, **w}, D, random.fold_in(key, 1))[0]

            def f_prime(u: Params) -> tuple[Tensor, tuple[Tensor, Params]]:
                value, buffers = task.loss({**state, **u}, D_prime, key)
                return value, (value, buffers)

            gradient = torch.func.grad(f)
            u = subtract(w, scale(gradient(w), self.lr_inner))
            g, (value, buffers) = torch.func.grad(f_prime, has_aux=True)(u)
            if self.form != "first-order":
                g = subtract(g, scale(self._hessian_times(gradient, w, g), self.lr_inner))
            return with_gradient(value, pick(state, w), g), buffers

        return train(task, state, batches, context, self.optimiser, loss=meta)

    def _hessian_times(self, gradient: Callable[[Params], Params], w: Params, g: Params) -> Params:
        """H g, exactly (H is symmetric) or by a difference of gradients."""
        if self.form == "exact":
            pull_back = torch.func.vjp(gradient, w)[1]
            product: Params = pull_back(g)[0]
            return product
        d = scale(g, self.delta)
        return scale(subtract(gradient(add(w, d)), gradient(subtract(w, d))), 0.5 / self.delta)

    def finetune(
        self, task: Task, state: Params, batches: Sequence[Batch], context: ClientContext
    ) -> Params:
        sgd = Optimiser("sgd", lr=self.lr_inner)
        return train(task, state, batches, context._replace(lr_scale=1.0), sgd)[0]


def halves(batch: Batch) -> tuple[Batch, Batch]:
    """Examples 0, 2, ... and examples 1, 3, ...; where a real one is missing to make a pair, the
    one before it stands in. Padding comes last in a batch, so neither half depends on it.

    >>> halves({"x": torch.arange(3)})
    ({'x': tensor([0, 2])}, {'x': tensor([1, 2])})
    """
    even = {name: value[0::2] for name, value in batch.items()}
    odd = {
        name: torch.cat([value[1::2], value[-1:]])[: len(even[name])]
        for name, value in batch.items()
    }
    if "weight" not in batch:
        return even, odd
    real = odd["weight"] > 0
    return even, {
        name: torch.where(real.view(-1, *[1] * (value.dim() - 1)), value, even[name])
        for name, value in odd.items()
    }
