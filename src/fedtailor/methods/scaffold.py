"""SCAFFOLD: control variates correct each client's steps for client drift.

SCAFFOLD: Stochastic Controlled Averaging for Federated Learning. S. P. Karimireddy, S. Kale,
M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh. ICML 2020.

Algorithm 1, x the server's model, S the cohort, N all clients, K client i's local steps:
    client i:  y_i <- x, then K times  y_i <- y_i - eta_l (g_i(y_i) - c_i + c)             (3)
               c_i+ = g_i(x)                                   (option I:  ``gradient``)
                    = c_i - c + (x - y_i) / (K eta_l)          (option II: ``steps``)      (4)
    server:    x <- x + eta_g / |S| sum_i (y_i - x)
               c <- c + 1 / N sum_i (c_i+ - c_i)                                           (5)

c and every c_i start at 0; c goes down with the model, c_i stays at the client.

Differs from the paper:
- c_i+ - c_i is not sent. With option II the server works it out, from y_i - x, c and K eta_l, at
  half the bytes; with option I it gets e_i = g_i(x) - (c_i - c + (x - y_i) / (K eta_l)), what
  option I adds to that. The numbers are the same, up to rounding.
- Option I takes g_i(x) as the mean over the round's batches.
- K is the number of steps that the client takes, eta_l the rate of this round.
- ``weights="examples"`` weighs y_i - x by examples; c always is the plain mean of the c_i.
- The running statistics of batch normalisations are averaged: no variates, no eta_g.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .. import random
from ..errors import InputError
from ..method import Cohort, FineTuning, Server
from ..optim import ClientContext, LearningRate, real_steps, scalar, train
from ..params import Batch, Params, add, add_prefix, pick, scale, split, strip_prefix, subtract
from ..stacked import weighted_sum
from ..task.task import Task

# c, c_i, e_i, K eta_l and N, beside the model's own names
_C, _C_I, _E = "scaffold.c.", "scaffold.own.", "scaffold.gap."
_PATH, _N = "scaffold.path", "scaffold.num_clients"


@dataclass(frozen=True)
class Scaffold(FineTuning):
    """SCAFFOLD; ``server_lr`` is eta_g, ``optimiser.lr`` eta_l; what is trained as in FedAvg."""

    name: ClassVar[str] = "scaffold"
    family: ClassVar[str] = "global"
    released: ClassVar[str] = "the length of each client's path"
    sends_updates: ClassVar[bool] = True
    beside_update: ClassVar[tuple[str, ...]] = (_PATH,)

    variates: Literal["steps", "gradient"] = "steps"
    server_lr: LearningRate = 1.0
    weights: Literal["uniform", "examples"] = "uniform"

    def check_settings(self, num_clients: int, cohort_size: int, rounds: int) -> None:
        sgd = self.optimiser
        plain = sgd.name == "sgd" and not sgd.momentum and sgd.clip is None
        if self.variates == "steps" and not plain:
            momentum = f", momentum {sgd.momentum}" if sgd.momentum else ""
            clip = f", clip {sgd.clip}" if sgd.clip else ""
            raise InputError(
                f"scaffold's variates = 'steps' reads gradients off the steps of plain SGD; the "
                f"optimiser is {sgd.name}{momentum}{clip}; allowed: sgd without momentum and clip, "
                f"or variates = 'gradient'"
            )

    def is_private(self, task: Task, name: str) -> bool:
        return name.startswith(_C_I)

    def init_client(self, task: Task, client: int, key: Tensor) -> Params:
        return add_prefix(_zeros(task), _C_I)

    def init_server(self, task: Task, num_clients: int, key: Tensor) -> Server:
        return {**task.state, **add_prefix(_zeros(task), _C), _N: torch.tensor(num_clients)}

    def change_clients(self, task: Task, server: Server, num_clients: int) -> Server:
        return {**server, _N: torch.tensor(num_clients)}

    def send(self, task: Task, server: Server, client: int) -> Params:
        return {name: value for name, value in server.items() if name != _N}

    def local(
        self, task: Task, state: Params, batches: Sequence[Batch], context: ClientContext
    ) -> tuple[Params, Tensor]:
        c, c_i = strip_prefix(state, _C), strip_prefix(state, _C_I)
        x = pick(state, task.state)
        correction = subtract(c, c_i)

        def penalty(y: Params) -> Tensor:  # its gradient is the correction
            return torch.stack([(y[n] * correction[n]).sum() for n in sorted(correction)]).sum()

        y, loss = train(task, x, batches, context, self.optimiser, penalty=penalty)
        rate = scalar(loss, self.optimiser.lr * context.lr_scale)
        path = loss.new_ones(()) * real_steps(batches) * rate
        moved = subtract(pick(x, c), pick(y, c))
        c_i = subtract(scale(moved, 1 / path), correction)  # (4), option II
        if self.variates == "steps":
            return {**y, _PATH: path, **add_prefix(c_i, _C_I)}, loss
        g = mean_gradient(task, x, batches, context.subkey(1))
        e_i = subtract(g, c_i)
        return {**y, _PATH: path, **add_prefix(e_i, _E), **add_prefix(g, _C_I)}, loss

    def upload(self, task: Task, received: Params, trained: Params) -> Params:
        y, rest = split(trained, lambda name: name in task.state)
        return {**subtract(y, pick(received, y)), **rest}

    def check_upload(
        self, task: Task, client: int, received: Params, upload: Params, steps: int, lr_scale: float
    ) -> None:
        path, expected = float(upload[_PATH]), steps * self.optimiser.lr * lr_scale
        if not math.isclose(path, expected, rel_tol=0.01):  # a loss in bfloat16 rounds it
            raise InputError(
                f"{_PATH} is {path:g}; allowed for the client's {steps} steps at the round's "
                f"rate: {expected:g}"
            )

    def aggregate(self, task: Task, server: Server, uploads: Params, cohort: Cohort) -> Server:
        S, N = len(cohort.clients), server[_N].double().cpu()
        p = cohort.shares if self.weights == "examples" else cohort.uniform
        x = pick(server, task.state)
        change = weighted_sum(pick(uploads, x), p)
        eta_g = {name: self.server_lr if name in task.trained else 1.0 for name in x}
        x = {name: x[name] + eta_g[name] * change[name] for name in x}
        # (5), with c_i+ - c_i = e_i - c - (y_i - x) / (K eta_l)
        c, e = strip_prefix(server, _C), strip_prefix(uploads, _E)
        drift = pick(uploads, c)
        gradients = weighted_sum(drift, -1 / (N * uploads[_PATH].double().cpu()))
        c = add(scale(c, 1 - S / N.item()), gradients)
        if e:
            c = add(c, weighted_sum(e, torch.full_like(p, 1 / N.item())))
        return {**x, **add_prefix(c, _C), _N: server[_N]}

    def inference_params(self, task: Task, state: Params) -> Params:
        return pick(state, task.state)


def mean_gradient(
    task: Task, x: Params, batches: Sequence[Batch], context: ClientContext
) -> Params:
    """The gradient of the training loss at ``x``, the mean over ``batches`` (padding has none)."""
    theta, buffers = split(x, lambda name: name in task.trained)

    def loss(theta: Params, batch: Batch, key: Tensor) -> Tensor:
        return task.loss({**buffers, **theta}, batch, key)[0]

    gradient = torch.func.grad(loss)
    total = scale(theta, 0.0)
    for number, batch in enumerate(batches):
        key = random.fold_in(context.key, number)
        for part, share in task.parts(batch, context.micro_batch):
            total = add(total, scale(gradient(theta, part, key), share))
    return scale(total, 1 / real_steps(batches))


def _zeros(task: Task) -> Params:
    return {n: torch.zeros_like(v) for n, v in task.state.items() if n in task.trained}
