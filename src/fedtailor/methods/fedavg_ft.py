"""FedAvg + FT: FedAvg, and in the end every client fine-tunes the shared model on its own data.

Improving Federated Learning Personalization via Model Agnostic Meta Learning. Y. Jiang, J. Konecny,
K. Rush, S. Kannan. arXiv 1909.12488, 2019.

    training:    as FedAvg
    evaluation:  w_k <- w - eta grad l(w; b) over the client's batches b, thrown away afterwards

This is the usual personalized baseline; the paper above is one of many that use it.

Differs from the paper: fine-tuning uses the optimiser of the local training, with its learning rate
times ``finetune_lr``; ``finetune_passes`` counts passes over the client's data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..method import FineTuning
from ..optim import ClientContext, LearningRate, Passes, train
from ..params import Batch, Params
from ..task.task import Task


@dataclass(frozen=True)
class FedAvgFT(FineTuning):
    """FedAvg; before use every client fine-tunes it for ``finetune_passes`` over its data, at
    ``finetune_lr`` times the learning rate."""

    name: ClassVar[str] = "fedavg-ft"
    family: ClassVar[str] = "global"
    needs_only_mean: ClassVar[bool] = True

    finetune_passes: Passes = 1
    finetune_lr: LearningRate = 1.0  # times the local learning rate

    def finetune(
        self, task: Task, state: Params, batches: Sequence[Batch], context: ClientContext
    ) -> Params:
        rate = self.finetune_lr * self.optimiser.lr
        return train(task, state, batches, context, self.optimiser, lr=lambda name: rate)[0]
