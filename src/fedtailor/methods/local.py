"""Local: every client trains alone from the same start; nothing is ever sent.

    client k:  w_k <- w_k - eta grad l(w_k; b) over its batches b

The lower bound that any federation has to beat. Differs from the paper: there is none.
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
from ..params import Params
from ..task import Backbone, Batch, Task


@dataclass(frozen=True)
class Local(Method):
    """Training without a federation: the whole state is private."""

    name: ClassVar[str] = "local"
    family: ClassVar[str] = "local"
    paper: ClassVar[Paper] = Paper(
        "(no paper: the baseline without a federation)", "", 0, "", "w_k <- w_k - eta grad l_k(w_k)"
    )

    trainable: Trainable = "full"
    rank: Annotated[int, Gt(0)] = 8
    alpha: Annotated[float, Gt(0)] = 16.0
    layers: tuple[str, ...] = ()  # with full: patterns of module paths to train; (): all
    optimiser: Optimiser = Optimiser()

    def adapt(self, backbone: Backbone) -> nn.Module:
        return choose_trainable(backbone, self.trainable, self.rank, self.alpha, self.layers)

    def is_private(self, task: Task, name: str) -> bool:
        return True

    def local(
        self, task: Task, state: Params, steps: Sequence[Batch], context: Context
    ) -> tuple[Params, Tensor]:
        return train(task, state, steps, context, self.optimiser)

    def aggregate(self, task: Task, server: Server, uploads: Params, cohort: Cohort) -> Server:
        return server

    def precompute(self, task: Task, batch: Batch) -> Params:
        return task.features(batch)

    def lora(self, task: Task, state: Params) -> dict[str, tuple[Tensor, Tensor]]:
        return lora_factors(state, self.alpha / self.rank)
