"""Two models with one head, weighed example by example by a gate (pFedMoE).

(a_G, a_F) = softmax(H(x)) and y = a_G h(G(x)) + a_F h(F(x)): G is the shared model, F the client's
own, h its head and H the gate. A model that goes on from a text has no head, and its gate weighs
each token by the text up to it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ...layers.gate_input import GateInput, pooled
from .base import Base, Batch


class Model(Base):
    """The two experts and the gate."""

    def logits(self, batch: Batch) -> Tensor:
        shared = self.forward(batch, self.part("shared"))
        own = self.forward(batch, self.part("own"))
        a = self._weights(batch)  # [b, 2], or of each token [b, L, 2]
        a = a.view(*a.shape[:-1], *[1] * (shared.dim() - a.dim()), 2)
        return a[..., :1] * shared + a[..., 1:] * own

    def _weights(self, batch: Batch) -> Tensor:
        source, gate, embedding = GateInput(**self.settings["gate_input"]), self.part("gate"), None
        if source.kind == "tokens":
            embedding = self.network.get_parameter(f"{source.path}.weight")
        x, real = source.read(self.inputs(batch), batch, embedding)
        seen = pooled(x, real, so_far=self.generates)
        hidden = torch.relu(F.linear(seen, gate["0.weight"], gate["0.bias"]))
        return torch.softmax(F.linear(hidden, gate["2.weight"], gate["2.bias"]), -1)
