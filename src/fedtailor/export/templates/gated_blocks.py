"""A model whose blocks of weights are scaled or dropped, by gates of each batch (pFedGate).

A gating layer predicts a gate M and an importance G for every block, as the mean over the batch.
The blocks of greatest importance that fit the client's budget are kept; a kept block is multiplied
by its gate, all others are zero. So a prediction depends on the rows that share a batch. A row by
itself has the gates that are predicted for that row alone.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ...layers.block_sparse.knapsack import greedy, knapsack
from ...layers.gate_input import GateInput, average, moments, normalisation
from .base import Base, Batch


class Model(Base):
    """The gated model."""

    def logits(self, batch: Batch) -> Tensor:
        if self.settings["gates_of"] == "batch":
            return self._gated(batch)
        rows = range(len(next(iter(batch.values()))))
        each = [{name: value[i : i + 1] for name, value in batch.items()} for i in rows]
        return torch.cat([self._gated(row) for row in each])

    def _gated(self, batch: Batch) -> Tensor:
        M, G = self._predicted(batch)
        gates = M * self._kept(G)  # [L]
        own, start, theta = dict(self.network.named_parameters()), 0, {}
        for name, sizes in self.settings["blocks"].items():
            parts = torch.split(own[name].flatten(), sizes)
            some = gates[start : start + len(sizes)]
            scaled = [part * gate for part, gate in zip(parts, some, strict=True)]
            theta[name] = torch.cat(scaled).view(own[name].shape)
            start += len(sizes)
        return self.forward(batch, theta)

    def _kept(self, G: Tensor) -> Tensor:
        """Which blocks are kept, bool ``[L]``: the first one of each parameter always is."""
        blocks = self.settings["blocks"].values()
        sizes = [size for parameter in blocks for size in parameter]
        always = [i == 0 for parameter in blocks for i in range(len(parameter))]
        solve = knapsack if self.settings["solver"] == "exact" else greedy
        importance = (G.double() * 2**20).round().numpy()
        budget = int(self.tensors["gate/budget"])
        return torch.from_numpy(solve(importance, sizes, budget, always))

    def _predicted(self, batch: Batch) -> Tensor:
        """M and G, ``[2, L]``."""
        source = GateInput(**self.settings["gate_input"])
        embedding = self.tensors.get("/embedding")
        x, real = source.read(self.inputs(batch), batch, embedding)
        vectors = x if embedding is None else average(x, real)
        gate = self.part("gate")
        if "norm.weight" in gate:
            _, mean, var, mean_ln, var_ln = moments(x, real)
            means = [mean, mean_ln, gate["moments.running_mean"]]
            variances = [var, var_ln, gate["moments.running_var"]]
            learned = {n.removeprefix("norm."): value for n, value in gate.items()}
            scale, shift = normalisation(means, variances, learned)  # [2, b, C]
            both = vectors * scale[..., None] + shift[..., None]
        else:
            both = vectors.expand(2, *vectors.shape)
        weight = gate["linear.weight"].view(2, -1, both[0, 0].numel())
        y = both.flatten(2) @ weight.mT  # [2, b, L]
        y = y.movedim(0, 1).flatten(1)
        if "linear.bias" in gate:
            y = y + gate["linear.bias"]
        if "post.running_mean" in gate:
            mean, var = gate["post.running_mean"], gate["post.running_var"]
            y = F.batch_norm(y, mean, var, gate["post.weight"], gate["post.bias"])
        y = y.view(len(y), 2, -1).movedim(1, 0)
        bounded = torch.sigmoid(y) if self.settings["sigmoid"] else 0.5 + y / 4
        return bounded.mean(1) * torch.tensor([[self.settings["gate_max"]], [1.0]])
