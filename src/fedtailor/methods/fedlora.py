"""FedLoRA: FedAvg on LoRA factors, which every client fine-tunes on its own data before use.

The name and this reading are those of papers that compare with it: FedMerge (Chen et al.) has it in
the place of FedAvg with local fine-tuning where LoRA is trained, and cites FedLoRA:
Model-Heterogeneous Personalized Federated Learning with LoRA Tuning. L. Yi, H. Yu, G. Wang, X. Liu.
arXiv 2310.13283, 2023.

    client k:  A_k, B_k, h_k <- gradient steps from A, B, h on y = W0 x + (alpha / r) B A x
    server:    A <- sum_k (n_k / n) A_k, and so B and the task head h
    in use:    A_k, B_k, h_k <- gradient steps from A, B, h; thrown away afterwards

Differs from the paper:
- It is FedIT with local fine-tuning. By its abstract, the FedLoRA of Yi et al. is another method:
  clients hold models of different architectures and exchange a small adapter of equal shape, which
  they train in turn with their own model. Here all clients hold the same frozen model.
- How long the papers that compare with it fine-tune could not be verified; one round's worth of
  local data is the usual choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Gt
from torch import Tensor, nn

from ..layers import choose_trainable, lora_factors
from ..method import Cohort, Method, Paper, Server
from ..optim import Context, Optimiser, train
from ..params import Params, weighted_sum
from ..task import Backbone, Batch, Task


@dataclass(frozen=True)
class FedLoRA(Method):
    """FedAvg on LoRA and the head; before use, ``finetune_passes`` rounds' worth of local steps at
    ``finetune_lr`` times the learning rate."""

    name: ClassVar[str] = "fedlora"
    family: ClassVar[str] = "adapter"
    paper: ClassVar[Paper] = Paper(
        "FedLoRA: Model-Heterogeneous Personalized Federated Learning with LoRA Tuning",
        "Yi, Yu, Wang, Liu",
        2023,
        "arXiv 2310.13283",
        "A <- sum_k (n_k / n) A_k, B <- sum_k (n_k / n) B_k; in use: A_k, B_k fine-tuned from A, B",
    )

    rank: Annotated[int, Gt(0)] = 8
    alpha: Annotated[float, Gt(0)] = 16.0
    optimiser: Optimiser = Optimiser("sgd", lr=0.05)
    finetune_passes: Annotated[int, Gt(0)] = 1
    finetune_lr: Annotated[float, Gt(0)] = 1.0  # times the local learning rate

    def adapt(self, backbone: Backbone) -> nn.Module:
        return choose_trainable(backbone, "lora", self.rank, self.alpha)

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
