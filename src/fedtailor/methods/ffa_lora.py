"""FFA-LoRA: LoRA whose A stays at its random start, the same for all, so that B can be averaged.

Improving LoRA in Privacy-preserving Federated Learning. Y. Sun, Z. Li, Y. Li, B. Ding. ICLR 2024.

A_0 random and frozen, B = 0 at the start, scaling alpha / r:
    client k:  B_k <- gradient steps from B on y = W0 x + (alpha / r) B A_0 x
    server:    B <- sum_k (n_k / n) B_k
    so that    sum_k (n_k / n) B_k A_0 = (sum_k (n_k / n) B_k) A_0
    which fails for LoRA, where the mean of the products isn't the product of the means.

Differs from the paper:
- Training is not differentially private; the paper adds DP-SGD to the same method.
- The task head is trained and averaged, too, as in the other methods on LoRA here.
- Equation numbers are left out: the paper's text could not be read here. So it is not verified what
  it does with heads, and how it draws A_0, which is N(0, 1 / r) here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import nn

from ..layers.lora import Alpha, Rank
from ..layers.parts import train_only
from ..layers.trainable import choose_trainable
from ..method import Method
from ..optim import Optimiser
from ..task.backbone import Backbone


@dataclass(frozen=True)
class FFALoRA(Method):
    """FedAvg on LoRA's B and the head; A is frozen inside the model and never sent."""

    name: ClassVar[str] = "ffa-lora"
    family: ClassVar[str] = "adapter"
    needs_only_mean: ClassVar[bool] = True

    rank: Rank = 8
    lora_alpha: Alpha = 16.0
    optimiser: Optimiser = field(default=Optimiser("sgd", lr=0.05), kw_only=True)

    def adapt(self, backbone: Backbone) -> nn.Module:
        model = choose_trainable(backbone, "lora", self.rank, self.lora_alpha)
        chosen = {name for name, p in model.named_parameters() if p.requires_grad}
        return train_only(model, lambda name: name in chosen and ".lora_A." not in name)
