"""FedSA-LoRA: of every LoRA the A matrices are averaged, and the B matrices stay with the clients.

Selective Aggregation for Low-Rank Adaptation in Federated Learning. P. Guo, S. Zeng, Y. Wang,
H. Fan, F. Wang, L. Qu. ICLR 2025.

    client k:  y = W0 x + s B_k A x,  s = alpha / r;  gradient steps on A_k and B_k
    up:        A_k
    server:    A <- sum_k p_k A_k,  p_k = n_k / n

Differs from the paper:
- The server weighs clients by their examples, as FedAvg does here, not by the plain mean.
- The task head, with its batch normalisation's statistics, is trained and averaged as A is.
  ``private_head=True`` keeps it with B_k.
- LoRA sits where it does for all methods here, not on the query and value projections, and A starts
  at N(0, 1/r). The variants for rsLoRA and VeRA are not here.
- A client that never took part uses A and the shared head with B = 0.
- Equation numbers are left out: only summaries of the paper could be read here. So it is not
  verified what it does with task heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from ..layers.lora import Alpha, Rank
from ..layers.parts import require_head
from ..layers.trainable import choose_trainable
from ..method import Method, Server
from ..params import Params
from ..task.backbone import Backbone
from ..task.task import Task


@dataclass(frozen=True)
class FedSALoRA(Method):
    """LoRA (rank r, scaling alpha / r) of which A is shared and B private."""

    name: ClassVar[str] = "fedsa-lora"
    family: ClassVar[str] = "adapter"
    needs_only_mean: ClassVar[bool] = True

    rank: Rank = 8
    lora_alpha: Alpha = 16.0
    private_head: bool = False

    def adapt(self, backbone: Backbone) -> nn.Module:
        return choose_trainable(backbone, "lora", self.rank, self.lora_alpha)

    def check(self, task: Task, num_clients: int, cohort_size: int, rounds: int) -> None:
        if self.private_head:
            require_head(task, "fedsa-lora.private_head")

    def is_private(self, task: Task, name: str) -> bool:
        return ".lora_B." in name or (self.private_head and task.in_head(name))

    def global_state(self, task: Task, server: Server) -> Params | None:
        return None if self.private_head else {**task.state, **server}
