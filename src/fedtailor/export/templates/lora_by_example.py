"""A shared and a local LoRA, weighed example by example by how familiar it looks (FedDPA).

w(x) = lam <r(x), a> / ||r(x)||, at least 0: r(x) is the input of one layer in the base model
without LoRA, a the mean direction of the client's training examples. Every adapted layer then
computes y = W0 x + (1 - w) B_g A_g x + w B_l A_l x.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from .base import HERE, Base, Batch


class Model(Base):
    """The base model, with the mixture of the two LoRAs added to each adapted layer's output."""

    def __init__(self, folder: Path | str = HERE) -> None:
        super().__init__(folder)
        self.w: Tensor | None = None  # [b], while the LoRAs are in use
        self.r: Tensor | None = None  # the last input of the layer whose input says how familiar
        paths = {name.rpartition("/")[0] for name in self.tensors}
        for path in sorted(paths - {"", "/head"}):
            layer = self.network.get_submodule(path)
            layer.register_forward_hook(partial(self._add, self.part(path)))
        source = self.network.get_submodule(self.settings["layer"])
        source.register_forward_pre_hook(self._remember)

    def logits(self, batch: Batch) -> Tensor:
        self.w = None
        self.forward(batch)
        familiar = self._representation(batch) @ self.tensors["/anchor"]
        self.w = (self.settings["lam"] * familiar).clamp(min=0)
        return self.forward(batch, self.part("/head"))

    def _remember(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.r = inputs[0].float()

    def _representation(self, batch: Batch) -> Tensor:
        """r / ||r|| of every example, ``[b, d]``: the mean over tokens, or the last one."""
        x, mask = self.r, batch.get("attention_mask")
        assert x is not None
        if x.dim() == 3 and mask is not None and mask.numel() == x[:, :, 0].numel():
            mask = mask.flatten(1)
            x = x.reshape(*mask.shape, -1)
            if self.generates:
                mask = mask * (mask.cumsum(1) == mask.sum(1, keepdim=True))
            return F.normalize((mask[:, :, None] * x).sum(1), dim=1)
        examples = len(next(iter(batch.values())))
        return F.normalize(x.reshape(examples, -1, x.shape[-1]).mean(1), dim=1)

    def _add(
        self, lora: dict[str, Tensor], layer: nn.Module, inputs: tuple[Any, ...], y: Tensor
    ) -> Tensor:
        if self.w is None:
            return y
        (x,) = inputs
        w = self.w.repeat_interleave(len(x) // len(self.w))  # a picture may have several windows
        w = w.view(-1, *[1] * (x.dim() - 1))
        shared = F.linear(F.linear(x, lora["shared_A"]), lora["shared_B"])
        local = F.linear(F.linear(x, lora["local_A"]), lora["local_B"])
        return y + (1 - w) * shared + w * local
