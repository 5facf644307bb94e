"""FedAvg + FT: FedAvg, and in the end every client fine-tunes the shared model on its own data.

The usual personalized baseline; see e.g. Improving Federated Learning Personalization via Model
Agnostic Meta Learning. Y. Jiang, J. Konecny, K. Rush, S. Kannan. arXiv 1909.12488, 2019.

    training:    as FedAvg
    evaluation:  w_k <- w - eta grad l(w; b) over the client's batches b, thrown away afterwards

Differs from the paper: fine-tuning uses the optimiser of the local training, with its learning rate
times ``finetune_lr``; ``finetune_passes`` counts rounds' worth of local data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Gt
from torch import Tensor, nn

from ..layers import Trainable, choose_trainable, lora_factors
from ..method import Cohort, Method, Paper, Server
from ..optim import Context, Optimiser, train
from ..params import Params, weighted_sum
from ..task import Backbone, Batch, Task


@dataclass(frozen=True)
class FedAvgFT(Method):
    """FedAvg whose shared model is fine-tuned by every client before it is used."""

    name: ClassVar[str] = "fedavg-ft"
    family: ClassVar[str] = "global"
    paper: ClassVar[Paper] = Paper(
        "Improving Federated Learning Personalization via Model Agnostic Meta Learning",
        "Jiang, Konecny, Rush, Kannan",
        2019,
        "arXiv 1909.12488",
        "w <- sum_k (n_k / n) w_k; in use: w_k = w - eta grad l_k(w), for some steps",
    )

    trainable: Trainable = "full"
    rank: Annotated[int, Gt(0)] = 8
    alpha: Annotated[float, Gt(0)] = 16.0
    layers: tuple[str, ...] = ()  # with full: patterns of module paths to train; (): all
    optimiser: Optimiser = Optimiser()
    finetune_passes: Annotated[int, Gt(0)] = 1
    finetune_lr: Annotated[float, Gt(0)] = 1.0  # times the local learning rate

    def adapt(self, backbone: Backbone) -> nn.Module:
        return choose_trainable(backbone, self.trainable, self.rank, self.alpha, self.layers)

    def local(
        self, task: Task, state: Params, steps: Sequence[Batch], context: Context
    ) -> tuple[Params, Tensor]:
        return train(task, state, steps, context, self.optimiser)

    def aggregate(self, task: Task, server: Server, uploads: Params, cohort: Cohort) -> Server:
        return weighted_sum(uploads, cohort.shares)

    @property
    def personal_passes(self) -> int:
        return self.finetune_passes

    def personalise(
        self, task: Task, state: Params, steps: Sequence[Batch], context: Context
    ) -> Params:
        rate = self.finetune_lr * self.optimiser.lr
        return train(task, state, steps, context, self.optimiser, lr=lambda name: rate)[0]

    def precompute(self, task: Task, batch: Batch) -> Params:
        return task.features(batch)

    def lora(self, task: Task, state: Params) -> dict[str, tuple[Tensor, Tensor]]:
        return lora_factors(state, self.alpha / self.rank)
