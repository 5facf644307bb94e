"""Two LoRAs in every adapted layer, weighed token by token by a mixer (FedALT).

(w_L, w_R) = softmax(G x) and y = W0 x + s (w_L B_L A_L x + w_R B_R A_R x).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .base import HERE, Base


class Model(Base):
    """The base model, with the sum of the two LoRAs added to each adapted layer's output."""

    def __init__(self, folder: Path | str = HERE) -> None:
        super().__init__(folder)
        for path in sorted({name.rpartition("/")[0] for name in self.tensors}):
            layer = self.network.get_submodule(path)
            layer.register_forward_hook(partial(self._add, self.part(path)))

    def _add(
        self, lora: dict[str, Tensor], layer: nn.Module, inputs: tuple[Any, ...], y: Tensor
    ) -> Tensor:
        (x,) = inputs
        w = torch.softmax(F.linear(x, lora["mixer"]), -1)  # [..., 2]
        individual = F.linear(F.linear(x, lora["individual_A"]), lora["individual_B"])
        rest = F.linear(F.linear(x, lora["rest_A"]), lora["rest_B"])
        s: float = self.settings["scaling"]
        return y + s * (w[..., :1] * individual + w[..., 1:] * rest)
