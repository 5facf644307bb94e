"""FedALA: every client mixes the received model into its own, with a learned weight per element.

FedALA: Adaptive Local Aggregation for Personalized Federated Learning. J. Zhang, Y. Hua, H. Wang,
T. Song, Z. Xue, R. Ma, H. Guan. AAAI 2023.

Theta: the received model; Theta_k: client k's model after its last training; W_k: weights in
[0, 1], at first 1, for the uppermost p layers. The layers below are overwritten.
    Theta^ = Theta_k + (Theta - Theta_k) * [1; W_k]
    W_k    <- clip(W_k - eta grad_W l_k(Theta^), 0, 1), on a sample of its data
    client k:  Theta_k <- Theta^ - alpha grad l_k(Theta^), step by step
    server:    Theta   <- sum_k (n_k / n) Theta_k

In use and in evaluations a client has Theta^ of the last Theta, with weights learned once more. In
round 1 Theta_k = Theta, so that Theta^ = Theta whatever W_k is.

Differs from the paper:
- In round 2 the paper trains W_k until the loss settles; here for ``start_passes`` passes. A client
  that first takes part later gets one pass; its Theta_k is then the initial model, as in the paper.
- The sample is a share of the batches of one pass, which are shuffled, not of the examples.
- A layer is one item of a list of layers, or a module beside such a list, with its norm; layers
  that are not trained don't count. Running statistics are always the received ones.
- n is the number of examples of the round's cohort. A client sends the change of its model.
- The paper's text could not be read here, only its authors' description of the method. Equation
  numbers are left out, and the defaults of p, eta and the sample are not verified.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from .. import random
from ..errors import InputError
from ..layers.parts import units
from ..method import Cohort, FineTuning, Server
from ..optim import ClientContext, Passes, batches_of_passes, real_steps, scalar, train
from ..params import Batch, Params, add, flat, pick, subtract, unflat
from ..stacked import weighted_sum
from ..task.task import Task

_LOCAL = "fedala.own"  # Theta_k of the mixed layers [P]
_WEIGHTS = "fedala.weights"  # W_k [P]


@dataclass(frozen=True)
class FedALA(FineTuning):
    """FedAvg whose clients start from a mix of the received model and their own in the upper
    ``mixed_layers`` (p); what is trained is chosen as in FedAvg. ``eta`` is the weights' rate."""

    name: ClassVar[str] = "fedala"
    family: ClassVar[str] = "mixture"
    sends_updates: ClassVar[bool] = True
    needs_only_mean: ClassVar[bool] = True

    mixed_layers: Annotated[int, Gt(0), Le(1000)] = 1
    eta: Annotated[float, Ge(0), Le(1e6)] = 1.0
    sample: Annotated[float, Gt(0), Le(1)] = 0.8  # of a pass's batches, for the weights
    start_passes: Passes = 10  # over the sample in round 2; later: 1

    def check(self, task: Task, num_clients: int, cohort_size: int, rounds: int) -> None:
        layers = trained_layers(task)
        if self.mixed_layers > len(layers):
            raise InputError(
                f"fedala: mixed_layers = {self.mixed_layers}; allowed: 1 to {len(layers)}, the "
                f"layers of {task.backbone.name!r} that are trained"
            )

    def is_private(self, task: Task, name: str) -> bool:
        return name in (_LOCAL, _WEIGHTS)

    def init_client(self, task: Task, client: int, key: Tensor) -> Params:
        Theta_k = flat(self._mixed(task, task.state))
        return {_LOCAL: Theta_k, _WEIGHTS: torch.ones_like(Theta_k)}

    def _mixed(self, task: Task, state: Params) -> Params:
        """The part of a state that is mixed: the uppermost p of the layers that are trained."""
        upper = trained_layers(task)[-self.mixed_layers :]
        return {name: state[name] for layer in upper for name in layer}

    def _mix(self, task: Task, state: Params, W: Tensor) -> Params:
        """Theta^, a state of the task; the received one where W = 1."""
        received = pick(state, task.state)
        Theta = self._mixed(task, received)
        return {**received, **unflat(torch.lerp(state[_LOCAL], flat(Theta), W), Theta)}

    def _learn(
        self,
        task: Task,
        state: Params,
        batches: Sequence[Batch],
        passes: int,
        context: ClientContext,
    ) -> Tensor:
        """The weights W ``[P]`` after a step on every batch of the sample."""
        batches = batches_of_passes(batches, context, 1)

        def loss(W: Tensor, batch: Batch, key: Tensor) -> tuple[Tensor, Params]:
            return task.loss(self._mix(task, state, W), batch, key)

        gradient = torch.func.grad(loss, has_aux=True)
        W = state[_WEIGHTS]
        # a share of the real batches: padding, which comes last, doesn't add to the sample
        limit = self.sample * scalar(W.new_empty((), dtype=torch.float64), real_steps(batches))
        for repeat in range(passes):
            for number, batch in enumerate(batches[: math.ceil(self.sample * len(batches))]):
                key = random.fold_in(random.fold_in(context.key, repeat), number)
                g, _ = gradient(W, batch, key)
                W = torch.where(number < limit, (W - self.eta * g).clamp(0, 1), W)
        return W

    def local(
        self, task: Task, state: Params, batches: Sequence[Batch], context: ClientContext
    ) -> tuple[Params, Tensor]:
        passes = self.start_passes if context.round == 2 else 1
        W = self._learn(task, state, batches, passes, context.subkey(1))
        trained, loss = train(task, self._mix(task, state, W), batches, context, self.optimiser)
        return {**trained, _LOCAL: flat(self._mixed(task, trained)), _WEIGHTS: W}, loss

    def upload(self, task: Task, received: Params, trained: Params) -> Params:
        return subtract(trained, received)

    def aggregate(self, task: Task, server: Server, uploads: Params, cohort: Cohort) -> Server:
        return add(server, weighted_sum(uploads, cohort.shares))

    @property
    def finetune_passes(self) -> int:
        return 1

    def finetune(
        self, task: Task, state: Params, batches: Sequence[Batch], context: ClientContext
    ) -> Params:
        return self._mix(task, state, self._learn(task, state, batches, 1, context.subkey(1)))


def trained_layers(task: Task) -> list[list[str]]:
    """The names of trained parameters, layer by layer (`units`), from the input up."""
    prefixes = [tuple(f"{path}." for path in unit) for unit in units(task.model)]
    names = sorted(task.trained)
    layers = [[name for name in names if name.startswith(paths)] for paths in prefixes]
    return [layer for layer in layers if layer]
