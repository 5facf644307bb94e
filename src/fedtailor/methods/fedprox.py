"""FedProx: FedAvg whose clients are held near the model that they received.

Federated Optimization in Heterogeneous Networks. T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi,
A. Talwalkar, V. Smith. MLSys 2020.

    client k:  min_w  h_k(w; w_t) = F_k(w) + mu/2 ||w - w_t||^2            (2)
    server:    w_{t+1} <- mean of the w_k                                  (Algorithm 2)

Differs from the paper:
- The server weighs clients by their examples and draws cohorts uniformly; the paper draws them by
  their examples and takes the plain mean. FedAvg here does the same, so that mu = 0 is FedAvg.
- Every client trains as long as the others; the paper lets slow ones stop early.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge, Le
from torch import Tensor

from ..method import FineTuning
from ..optim import ClientContext, proximal, train
from ..params import Batch, Params, pick
from ..task.task import Task


@dataclass(frozen=True)
class FedProx(FineTuning):
    """FedAvg with a proximal term of weight ``mu``; what is trained is chosen as in FedAvg."""

    name: ClassVar[str] = "fedprox"
    family: ClassVar[str] = "regularised"
    needs_only_mean: ClassVar[bool] = True

    mu: Annotated[float, Ge(0), Le(1e6)] = 0.01

    def local(
        self, task: Task, state: Params, batches: Sequence[Batch], context: ClientContext
    ) -> tuple[Params, Tensor]:
        w_t = pick(state, task.trained)
        penalty = proximal(w_t, self.mu)
        return train(task, state, batches, context, self.optimiser, penalty=penalty)
