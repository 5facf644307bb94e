"""FedAdagrad, FedAdam and FedYogi: an adaptive server on the mean of what clients changed.

Adaptive Federated Optimization. S. J. Reddi, Z. Charles, M. Zaheer, Z. Garrett, K. Rush,
J. Konecny, S. Kumar, H. B. McMahan. ICLR 2021.

x_i is x after client i's local steps, p_i its weight:
    Delta = sum_i p_i (x_i - x)
    m <- beta1 m + (1 - beta1) Delta
    v <- v + Delta^2                                       (FedAdagrad)
    v <- v - (1 - beta2) Delta^2 sign(v - Delta^2)         (FedYogi)
    v <- beta2 v + (1 - beta2) Delta^2                     (FedAdam)
    x <- x + eta m / (sqrt(v) + tau)

eta: ``server_lr``; m starts at 0, v at tau^2; there is no bias correction. As in the paper's
experiments beta1 = 0.9, beta2 = 0.99, and beta1 = 0 for FedAdagrad; tau = 1e-3.

Differs from the paper:
- p_i is n_i / n over the cohort; the paper's algorithm takes the plain mean.
- The paper tunes eta for each task; the default here is 0.01.
- The running statistics of batch normalisations are averaged plainly: they are no part of x.
- Equation numbers are left out: the paper's text could not be read here. By an account of it, v
  starts at tau^2 or more.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor

from ..method import Cohort, FineTuning, Server
from ..optim import LearningRate
from ..params import Params, add_prefix, flat, pick, strip_prefix, unflat
from ..stacked import weighted_sum
from ..task.task import Task

_M, _V = "server.m.", "server.v."  # of the server's moments, beside the model's own names


@dataclass(frozen=True)
class _FedOpt(FineTuning):
    """All of the update but the line of v."""

    family: ClassVar[str] = "global"
    needs_only_mean: ClassVar[bool] = True

    server_lr: LearningRate = 0.01
    beta1: Annotated[float, Ge(0), Lt(1)] = 0.9
    tau: Annotated[float, Gt(0), Le(1e6)] = 1e-3

    @abstractmethod
    def next_v(self, v: Tensor, square: Tensor) -> Tensor:
        """The next v from v and Delta^2, each ``[P]``."""

    def init_server(self, task: Task, num_clients: int, key: Tensor) -> Server:
        x = {name: value for name, value in task.state.items() if name in task.trained}
        m = {name: torch.zeros_like(value) for name, value in x.items()}
        v = {name: torch.full_like(value, self.tau**2) for name, value in x.items()}
        return {**task.state, **add_prefix(m, _M), **add_prefix(v, _V)}

    def send(self, task: Task, server: Server, client: int) -> Params:
        return pick(server, task.state)

    def aggregate(self, task: Task, server: Server, uploads: Params, cohort: Cohort) -> Server:
        average = weighted_sum(uploads, cohort.shares)
        names = strip_prefix(server, _M)  # what is trained: buffers have no moments
        x, m, v = (flat({n: server[prefix + n] for n in names}) for prefix in ("", _M, _V))  # [P]
        delta = flat(pick(average, names)) - x
        m = self.beta1 * m + (1 - self.beta1) * delta
        v = self.next_v(v, delta.square())
        x = x + self.server_lr * m / (v.sqrt() + self.tau)
        moments = {**add_prefix(unflat(m, names), _M), **add_prefix(unflat(v, names), _V)}
        return {**average, **unflat(x, names), **moments}


@dataclass(frozen=True)
class FedAdagrad(_FedOpt):
    """FedAvg whose server is Adagrad; what is trained is chosen as in FedAvg."""

    name: ClassVar[str] = "fedadagrad"

    beta1: Annotated[float, Ge(0), Lt(1)] = 0.0

    def next_v(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square


@dataclass(frozen=True)
class FedAdam(_FedOpt):
    """FedAvg whose server is Adam; what is trained is chosen as in FedAvg."""

    name: ClassVar[str] = "fedadam"

    beta2: Annotated[float, Ge(0), Lt(1)] = 0.99

    def next_v(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * square


@dataclass(frozen=True)
class FedYogi(_FedOpt):
    """FedAvg whose server is Yogi: v moves by (1 - beta2) Delta^2, up or down; what is trained is
    chosen as in FedAvg."""

    name: ClassVar[str] = "fedyogi"

    beta2: Annotated[float, Ge(0), Lt(1)] = 0.99

    def next_v(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * torch.sign(v - square)
