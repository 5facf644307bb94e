"""FedLoRA: FedAvg on LoRA and the head, which every client fine-tunes before it uses them.

FedLoRA: Model-Heterogeneous Personalized Federated Learning with LoRA Tuning. L. Yi, H. Yu,
G. Wang, X. Liu. arXiv 2310.13283, 2023.

    training:    A <- sum_k (n_k / n) A_k,  B <- sum_k (n_k / n) B_k, and the head alike
    evaluation:  A_k, B_k <- gradient steps from A, B on the client's data, thrown away afterwards

Differs from the paper:
- The name and this reading are those of papers that compare with it: FedMerge (Chen et al.) has it
  in the place of FedAvg with local fine-tuning where LoRA is trained, and cites the paper above. By
  its abstract, that paper describes another method: clients hold models of different architectures
  and exchange a small adapter of equal shape, which they train in turn with their own model. Here
  all clients hold the same frozen model.
- How long the papers that compare with it fine-tune could not be verified; one pass over the
  client's data is the usual choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ..method import FineTuning
from ..optim import ClientContext, LearningRate, Optimiser, Passes, train
from ..params import Batch, Params
from ..task.task import Task


@dataclass(frozen=True)
class FedLoRA(FineTuning):
    """FedAvg with local fine-tuning, on LoRA and the head."""

    name: ClassVar[str] = "fedlora"
    family: ClassVar[str] = "adapter"
    needs_only_mean: ClassVar[bool] = True

    trainable: Literal["lora"] = field(default="lora", kw_only=True)
    optimiser: Optimiser = field(default=Optimiser(lr=0.05), kw_only=True)
    finetune_passes: Passes = 1  # over the client's data, before use
    finetune_lr: LearningRate = 1.0  # times the local learning rate

    def finetune(
        self, task: Task, state: Params, batches: Sequence[Batch], context: ClientContext
    ) -> Params:
        rate = self.finetune_lr * self.optimiser.lr
        return train(task, state, batches, context, self.optimiser, lr=lambda name: rate)[0]
