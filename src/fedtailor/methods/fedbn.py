"""FedBN: FedAvg that leaves every client its own normalisations.

FedBN: Federated Learning on Non-IID Features via Local Batch Normalization. X. Li, M. Jiang,
X. Zhang, M. Kamp, Q. Dou. ICLR 2021.

l runs over the layers:
    client k:  w_k <- w_k - eta grad l_k(w_k), all layers, for its local steps
    server:    w^(l) <- sum_k (n_k / n) w_k^(l)       if layer l is no normalisation
    client k:  keeps w_k^(l), scale, shift and running statistics, if it is one

Differs from the paper:
- Every normalisation stays with the client (batch, layer, group, instance, RMS); the paper is about
  batch normalisation.
- A client that never took part has the normalisations of the initial model. There is no global
  model.
- The mean is weighted by the cohort's examples.
- Equation numbers are left out: the paper's text could not be read here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..errors import InputError
from ..layers.parts import in_norm
from ..method import FineTuning
from ..task.task import Task


@dataclass(frozen=True)
class FedBN(FineTuning):
    """FedAvg with private normalisations; what is trained is chosen as in FedAvg."""

    name: ClassVar[str] = "fedbn"
    family: ClassVar[str] = "split"
    needs_only_mean: ClassVar[bool] = True

    def check(self, task: Task, num_clients: int, cohort_size: int, rounds: int) -> None:
        norm = in_norm(task)
        if not any(norm(name) for name in task.state):
            raise InputError(
                f"fedbn keeps trained normalisations private, and none is trained in model "
                f"{task.backbone.name!r} with trainable = {self.trainable!r}, layers = "
                f"{list(self.layers)}; allowed: what trains one, such as full and all layers, or "
                f"one named in model.head"
            )

    def is_private(self, task: Task, name: str) -> bool:
        return in_norm(task)(name)
