"""FedAvgM: FedAvg whose server moves the model with momentum.

Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification.
T.-M. H. Hsu, H. Qi, M. Brown. arXiv 1909.06335, 2019.

    Delta w = sum_k (n_k / n) (w - w_k)
    v <- beta v + Delta w,    w <- w - gamma v

beta: ``momentum``; gamma: ``server_lr``; v starts at 0.

Differs from the paper:
- The paper's step is gamma = 1; n counts the cohort's examples.
- The running statistics of batch normalisations are averaged plainly, without momentum.
- Equation numbers are left out: the paper's text could not be read here. So it is not verified
  whether its experiments take Nesterov's form of momentum; here it is the plain one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Lt
from torch import Tensor

from ..method import Cohort, FineTuning, Server
from ..optim import LearningRate, Optimiser
from ..params import Params, add, add_prefix, pick, scale, strip_prefix, subtract
from ..stacked import weighted_sum
from ..task.task import Task

_V = "server.v."  # of the server's momentum, beside the model's own names


@dataclass(frozen=True)
class FedAvgM(FineTuning):
    """FedAvg with server momentum; what is trained is chosen as in FedAvg."""

    name: ClassVar[str] = "fedavgm"
    family: ClassVar[str] = "global"
    needs_only_mean: ClassVar[bool] = True

    momentum: Annotated[float, Ge(0), Lt(1)] = 0.9
    server_lr: LearningRate = 1.0
    # small: in the long run, momentum 0.9 makes ten steps of one
    optimiser: Optimiser = field(default=Optimiser(lr=0.003), kw_only=True)

    def init_server(self, task: Task, num_clients: int, key: Tensor) -> Server:
        v = {n: torch.zeros_like(w) for n, w in task.state.items() if n in task.trained}
        return {**task.state, **add_prefix(v, _V)}

    def send(self, task: Task, server: Server, client: int) -> Params:
        return pick(server, task.state)

    def aggregate(self, task: Task, server: Server, uploads: Params, cohort: Cohort) -> Server:
        average = weighted_sum(uploads, cohort.shares)
        v = strip_prefix(server, _V)
        w = pick(server, v)
        delta = subtract(w, pick(average, v))
        v = add(scale(v, self.momentum), delta)
        return {**average, **subtract(w, scale(v, self.server_lr)), **add_prefix(v, _V)}
