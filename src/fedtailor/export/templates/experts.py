"""Two models with one head, weighed example by example by a gate (pFedMoE).

(a_G, a_F) = softmax(H(x)) and y = a_G h(G(x)) + a_F h(F(x)): G is the shared model, F the client's
own, h its head and H the gate.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ...layers.gate_input import GateInput, average
from .base import Base, Batch


class Model(Base):
    """The two experts and the gate."""

    def logits(self, batch: Batch) -> Tensor:
        a = self._weights(batch)  # [b, 2]
        shared = self.forward(batch, self.part("shared"))
        own = self.forward(batch, self.part("own"))
        return a[:, :1] * shared + a[:, 1:] * own

    def _weights(self, batch: Batch) -> Tensor:
        source, gate, embedding = GateInput(**self.settings["gate_input"]), self.part("gate"), None
        if source.kind == "tokens":
            embedding = self.network.get_parameter(f"{source.path}.weight")
        x, real = source.read(self.inputs(batch), batch, embedding)
        if source.kind == "tokens":
            x = average(x, real)
        hidden = torch.relu(F.linear(x.flatten(1), gate["0.weight"], gate["0.bias"]))
        return torch.softmax(F.linear(hidden, gate["2.weight"], gate["2.bias"]), 1)
