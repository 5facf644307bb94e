"""FedAdagrad, FedAdam and FedYogi: an adaptive server on the mean of what clients changed.

Adaptive Federated Optimization. S. J. Reddi, Z. Charles, M. Zaheer, Z. Garrett, K. Rush,
J. Konecny, S. Kumar, H. B. McMahan. ICLR 2021.

Algorithm 2; x_i is x after client i's local steps, p_i its weight:
    Delta = sum_i p_i (x_i - x)
    m <- beta1 m + (1 - beta1) Delta
    v <- v + Delta^2                                       (FedAdagrad)
    v <- v - (1 - beta2) Delta^2 sign(v - Delta^2)         (FedYogi)
    v <- beta2 v + (1 - beta2) Delta^2                     (FedAdam)
    x <- x + eta m / (sqrt(v) + tau)

eta: ``server_lr``; m starts at 0, v at tau^2; there is no bias correction. As in the paper's
experiments beta1 = 0.9, beta2 = 0.99, and beta1 = 0 for FedAdagrad; tau = 1e-3.

Differs from the paper:
- p_i is n_i / n over the cohort, as in its experiments; Algorithm 2 has the plain mean.
- The paper tunes eta for each task; the default here is 0.01.
- The running statistics of batch normalisations are averaged plainly: they are no part of x.
- The paper's text could not be had; its start of v is only known to be at least tau^2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor, nn

from ..layers import Trainable, choose_trainable, lora_factors
from ..method import Cohort, Method, Paper, Server
from ..optim import Context, Optimiser, train
from ..params import Params, flat, prefixed, under, unflat, weighted_sum
from ..task import Backbone, Batch, Task

_M, _V = "server.m.", "server.v."  # of the server's moments, beside the model's own names


def _paper(update: str) -> Paper:
    return Paper(
        "Adaptive Federated Optimization",
        "Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan",
        2021,
        "ICLR",
        f"m <- beta1 m + (1 - beta1) Delta; {update}; x <- x + eta m / (sqrt(v) + tau)",
    )


def start(task: Task, tau: float) -> Server:
    """The server's first state: the model, m = 0 and v = tau^2 for what is trained."""
    x = {name: value for name, value in task.state.items() if name in task.trained}
    m = {name: torch.zeros_like(value) for name, value in x.items()}
    v = {name: torch.full_like(value, tau**2) for name, value in x.items()}
    return {**task.state, **prefixed(m, _M), **prefixed(v, _V)}


def model_of(task: Task, server: Server) -> Params:
    """The server's state without the moments."""
    return {name: server[name] for name in task.state}


def server_step(
    server: Server,
    average: Params,
    next_v: Callable[[Tensor, Tensor], Tensor],
    server_lr: float,
    beta1: float,
    tau: float,
) -> Server:
    """Algorithm 2 from the clients' ``average``; what has no moments (buffers) takes its value.

    ``next_v`` makes the next v from v and Delta^2, each ``[P]``.
    """
    names = under(server, _M)
    x, m, v = (flat({n: server[prefix + n] for n in names}) for prefix in ("", _M, _V))  # [P]
    delta = flat({n: average[n] for n in names}) - x
    m = beta1 * m + (1 - beta1) * delta
    v = next_v(v, delta.square())
    x = x + server_lr * m / (v.sqrt() + tau)
    moments = {**prefixed(unflat(m, names), _M), **prefixed(unflat(v, names), _V)}
    return {**average, **unflat(x, names), **moments}


@dataclass(frozen=True)
class FedAdagrad(Method):
    """FedAvg whose server is Adagrad; what is trained is chosen as in FedAvg."""

    name: ClassVar[str] = "fedadagrad"
    family: ClassVar[str] = "global"
    paper: ClassVar[Paper] = _paper("v <- v + Delta^2")

    server_lr: Annotated[float, Gt(0)] = 0.01
    beta1: Annotated[float, Ge(0), Lt(1)] = 0.0
    tau: Annotated[float, Gt(0)] = 1e-3
    trainable: Trainable = "full"
    rank: Annotated[int, Gt(0)] = 8
    alpha: Annotated[float, Gt(0)] = 16.0
    layers: tuple[str, ...] = ()  # with full: patterns of module paths to train; (): all
    optimiser: Optimiser = Optimiser()

    def adapt(self, backbone: Backbone) -> nn.Module:
        return choose_trainable(backbone, self.trainable, self.rank, self.alpha, self.layers)

    def init_server(self, task: Task, num_clients: int, key: Tensor) -> Server:
        return start(task, self.tau)

    def send(self, task: Task, server: Server, client: int) -> Params:
        return model_of(task, server)

    def local(
        self, task: Task, state: Params, steps: Sequence[Batch], context: Context
    ) -> tuple[Params, Tensor]:
        return train(task, state, steps, context, self.optimiser)

    def aggregate(self, task: Task, server: Server, uploads: Params, cohort: Cohort) -> Server:
        def next_v(v: Tensor, square: Tensor) -> Tensor:
            return v + square

        average = weighted_sum(uploads, cohort.shares)
        return server_step(server, average, next_v, self.server_lr, self.beta1, self.tau)

    def global_state(self, task: Task, server: Server) -> Params | None:
        return model_of(task, server)

    def precompute(self, task: Task, batch: Batch) -> Params:
        return task.features(batch)

    def lora(self, task: Task, state: Params) -> dict[str, tuple[Tensor, Tensor]]:
        return lora_factors(state, self.alpha / self.rank)


@dataclass(frozen=True)
class FedAdam(Method):
    """FedAvg whose server is Adam; what is trained is chosen as in FedAvg."""

    name: ClassVar[str] = "fedadam"
    family: ClassVar[str] = "global"
    paper: ClassVar[Paper] = _paper("v <- beta2 v + (1 - beta2) Delta^2")

    server_lr: Annotated[float, Gt(0)] = 0.01
    beta1: Annotated[float, Ge(0), Lt(1)] = 0.9
    beta2: Annotated[float, Ge(0), Lt(1)] = 0.99
    tau: Annotated[float, Gt(0)] = 1e-3
    trainable: Trainable = "full"
    rank: Annotated[int, Gt(0)] = 8
    alpha: Annotated[float, Gt(0)] = 16.0
    layers: tuple[str, ...] = ()  # with full: patterns of module paths to train; (): all
    optimiser: Optimiser = Optimiser()

    def adapt(self, backbone: Backbone) -> nn.Module:
        return choose_trainable(backbone, self.trainable, self.rank, self.alpha, self.layers)

    def init_server(self, task: Task, num_clients: int, key: Tensor) -> Server:
        return start(task, self.tau)

    def send(self, task: Task, server: Server, client: int) -> Params:
        return model_of(task, server)

    def local(
        self, task: Task, state: Params, steps: Sequence[Batch], context: Context
    ) -> tuple[Params, Tensor]:
        return train(task, state, steps, context, self.optimiser)

    def aggregate(self, task: Task, server: Server, uploads: Params, cohort: Cohort) -> Server:
        def next_v(v: Tensor, square: Tensor) -> Tensor:
            return self.beta2 * v + (1 - self.beta2) * square

        average = weighted_sum(uploads, cohort.shares)
        return server_step(server, average, next_v, self.server_lr, self.beta1, self.tau)

    def global_state(self, task: Task, server: Server) -> Params | None:
        return model_of(task, server)

    def precompute(self, task: Task, batch: Batch) -> Params:
        return task.features(batch)

    def lora(self, task: Task, state: Params) -> dict[str, tuple[Tensor, Tensor]]:
        return lora_factors(state, self.alpha / self.rank)


@dataclass(frozen=True)
class FedYogi(Method):
    """FedAvg whose server is Yogi: v moves by (1 - beta2) Delta^2, up or down; what is trained is
    chosen as in FedAvg."""

    name: ClassVar[str] = "fedyogi"
    family: ClassVar[str] = "global"
    paper: ClassVar[Paper] = _paper("v <- v - (1 - beta2) Delta^2 sign(v - Delta^2)")

    server_lr: Annotated[float, Gt(0)] = 0.01
    beta1: Annotated[float, Ge(0), Lt(1)] = 0.9
    beta2: Annotated[float, Ge(0), Lt(1)] = 0.99
    tau: Annotated[float, Gt(0)] = 1e-3
    trainable: Trainable = "full"
    rank: Annotated[int, Gt(0)] = 8
    alpha: Annotated[float, Gt(0)] = 16.0
    layers: tuple[str, ...] = ()  # with full: patterns of module paths to train; (): all
    optimiser: Optimiser = Optimiser()

    def adapt(self, backbone: Backbone) -> nn.Module:
        return choose_trainable(backbone, self.trainable, self.rank, self.alpha, self.layers)

    def init_server(self, task: Task, num_clients: int, key: Tensor) -> Server:
        return start(task, self.tau)

    def send(self, task: Task, server: Server, client: int) -> Params:
        return model_of(task, server)

    def local(
        self, task: Task, state: Params, steps: Sequence[Batch], context: Context
    ) -> tuple[Params, Tensor]:
        return train(task, state, steps, context, self.optimiser)

    def aggregate(self, task: Task, server: Server, uploads: Params, cohort: Cohort) -> Server:
        def next_v(v: Tensor, square: Tensor) -> Tensor:
            return v - (1 - self.beta2) * square * torch.sign(v - square)

        average = weighted_sum(uploads, cohort.shares)
        return server_step(server, average, next_v, self.server_lr, self.beta1, self.tau)

    def global_state(self, task: Task, server: Server) -> Params | None:
        return model_of(task, server)

    def precompute(self, task: Task, batch: Batch) -> Params:
        return task.features(batch)

    def lora(self, task: Task, state: Params) -> dict[str, tuple[Tensor, Tensor]]:
        return lora_factors(state, self.alpha / self.rank)
