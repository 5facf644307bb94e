"""Gating layers: what they see of a batch, and pFedGate's, which predicts a gate and an importance
for every block of a model.

pFedGate's layer has two equal paths, one for the gates M and one for the importances G. Each is a
switchable normalisation, a linear layer, a batch normalisation and a sigmoid (Chen et al., ICML
2023, section 5.2.1). Both paths read the same input, so that they are worked out together: the
first half of the linear layer's outputs belongs to M, the second to G.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..params import Batch, Params, constant
from ..task.batch_norm import FunctionalBatchNorm
from ..task.step import StepModule
from ..task.task import Task
from .block_sparse.blocks import Blocks
from .gate_input import GateInput, average, moments, normalisation

_MOMENTUM = 0.1  # of running moments


class Moments(StepModule):
    """Means and variances of ``x`` ``[b, C, P]`` by instance ``[b, C]``, layer ``[b, 1]`` and batch
    ``[C]``. Outside training those of the batch are running ones. Both paths share them."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.state_buffers = ("running_mean", "running_var")

    def forward(
        self, x: Tensor, real: Tensor | None, weight: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """``real`` ``[b, P]`` (None: all) and ``weight`` ``[b]`` are 0 for padding."""
        count, mean, var, mean_ln, var_ln = moments(x, real)
        square = var + mean.square()
        mean_bn, var_bn = self._of_batch(mean, square, count * weight)
        return [mean, mean_ln, mean_bn], [var, var_ln, var_bn]

    def _of_batch(self, mean_in: Tensor, square: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        if not self.step.training:
            return self.running_mean, self.running_var
        w = count / count.sum().clamp(min=1)
        mean = w @ mean_in
        var = (w @ square - mean.square()).clamp(min=0)
        self.record("running_mean", torch.lerp(self.running_mean, mean, _MOMENTUM))
        self.record("running_var", torch.lerp(self.running_var, var, _MOMENTUM))
        return mean, var


class SwitchableNorm(nn.Module):
    """Switchable normalisation (Luo et al., ICLR 2019) for both paths.

    Moments by instance, layer and batch are mixed by learned softmax weights, one set for means and
    one for variances.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.mean_weight = nn.Parameter(torch.ones(2, 3))
        self.var_weight = nn.Parameter(torch.ones(2, 3))
        self.weight = nn.Parameter(torch.ones(2, channels))
        self.bias = nn.Parameter(torch.zeros(2, channels))

    def forward(self, means: list[Tensor], variances: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The scale and the shift of inputs ``[b, C, P]`` with these `Moments`, each
        ``[2, b, C]``."""
        return normalisation(means, variances, self._parameters)


class Affine(nn.Module):
    """A scale and a shift for each of L numbers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias


def gate_input(task: Task, source: GateInput, batch: Batch) -> tuple[Tensor, Tensor | None]:
    """What a gating layer sees of a batch, `GateInput.read`. Tokens are embedded as the model
    embedded them before any training."""
    embedding: Any = None
    if source.kind == "tokens":
        embedding = task.model.get_submodule(source.path).weight
    return source.read(task.inputs(batch), batch, embedding)


class GatingLayer(StepModule):
    """pFedGate's g_phi before the mean over the batch, and what a client keeps beside it.

    A client keeps its ``budget``, a number of parameters. Where one set of gates serves a client,
    it also keeps the mean input (``features``) or the mean M and G (``means``) over its training
    examples.
    """

    budget: Tensor

    def __init__(
        self,
        source: GateInput,
        layout: Blocks,
        *,
        pre_norm: bool = True,
        post_norm: bool = True,
        sigmoid: bool = True,
        gate_max: float = 1.0,
        one_input: bool = False,
        keep_means: bool = False,
    ) -> None:
        """``one_input``: the layer sees a client's mean input instead of batches; ``keep_means``:
        it keeps the client's mean M and G."""
        super().__init__()
        L = len(layout.W)
        self.moments = Moments(source.channels) if pre_norm else None
        self.norm = SwitchableNorm(source.channels) if pre_norm else None
        inputs = source.channels * source.positions
        self.linear = nn.Linear(inputs, 2 * L, bias=not post_norm)
        self.post: nn.Module = nn.Identity()
        if post_norm:
            self.post = (
                Affine(2 * L) if one_input else FunctionalBatchNorm(nn.BatchNorm1d(2 * L), True)
            )
        self.source, self.layout = source, layout
        self._sigmoid = sigmoid
        self._scale = (gate_max, 1.0)
        self.register_buffer("budget", torch.tensor(layout.d))
        self.state_buffers = ("budget",)
        if one_input:
            self.register_buffer("features", torch.zeros(source.channels, source.positions))
            self.state_buffers += ("features",)
        if keep_means:
            self.register_buffer("means", (torch.tensor(self._scale) / 2)[:, None].repeat(1, L))
            self.state_buffers += ("means",)

    def forward(self, x: Tensor, real: Tensor | None, weight: Tensor) -> Tensor:
        """M and G of every example, ``[2, b, L]``."""
        vectors = average(x, real) if self.source.kind == "tokens" else x
        if self.norm is None or self.moments is None:
            y = self.linear(vectors.flatten(1))
        else:
            y = self._normalised(vectors, *self.norm(*self.moments(x, real, weight)))
        both = self.post(y).view(len(x), 2, -1).movedim(1, 0)
        bounded = torch.sigmoid(both) if self._sigmoid else 0.5 + both / 4
        return bounded * constant(self._scale, torch.float32, both.device)[:, None, None]

    def _normalised(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        """The linear layer, ``[b, 2 L]``, each half of it on one of the two ``x * scale + shift``.

        With many positions the scaling comes after the product, which is then the smaller tensor.
        """
        _, channels, positions = x.shape
        weight = self.linear.weight.view(2, -1, channels, positions)
        if positions == 1:
            y = (x[:, :, 0] * scale + shift) @ weight[:, :, :, 0].mT  # [2, b, L]
        else:
            each = x.movedim(1, 0) @ weight.flatten(0, 1).permute(1, 2, 0)  # [C, b, 2 L]
            scaled = each.view(*each.shape[:2], 2, -1) * scale.permute(2, 1, 0)[..., None]
            y = scaled.sum(0).movedim(1, 0) + shift @ weight.sum(3).mT
        y = y.movedim(0, 1).flatten(1)
        return y if self.linear.bias is None else y + self.linear.bias


def gating_layer(task: Task) -> GatingLayer:
    """The gating layer that stands beside the task's model, as ``gate``."""
    gate = task.model.get_submodule("gate")
    assert isinstance(gate, GatingLayer)
    return gate


def gated_blocks(task: Task) -> Blocks:
    """The blocks for which the task's gating layer predicts gates."""
    return gating_layer(task).layout


def gate_examples(task: Task, state: Params, batch: Batch) -> tuple[Tensor, Tensor | None, Tensor]:
    """The input of the task's gating layer, which positions are real (None: all), and each
    example's weight ``[b]``, 0 for padding.

    Where the layer sees a client's mean input, that is the only example, whatever the batch.
    """
    if "gate.features" not in state:
        return _examples(task, batch)
    x = state["gate.features"][None]
    return x, None, torch.ones_like(x[:, 0, 0])


def _examples(task: Task, batch: Batch) -> tuple[Tensor, Tensor | None, Tensor]:
    x, real = gate_input(task, gating_layer(task).source, batch)
    weight = batch["weight"].to(x.dtype) if "weight" in batch else torch.ones_like(x[:, 0, 0])
    return x, real, weight


def batch_mean(both: Tensor, weight: Tensor) -> Tensor:
    """M and G of every example, ``[2, b, L]``, averaged over the real ones, ``[2, L]``."""
    return weight @ both / weight.sum().clamp(min=1)


def mean_input(task: Task, batches: Sequence[Batch]) -> Tensor:
    """The mean input of the gating layer over the examples of ``batches``, ``[C, P]``."""

    def total(x: Tensor, real: Tensor | None, weight: Tensor) -> Tensor:
        if gating_layer(task).source.kind == "tokens":
            x = average(x, real)
        return (x * weight[:, None, None]).sum(0)

    return _mean_over_examples(task, batches, total)


def mean_gates(task: Task, state: Params, batches: Sequence[Batch]) -> Tensor:
    """M and G outside training, averaged over the examples of ``batches``, ``[2, L]``."""

    def total(x: Tensor, real: Tensor | None, weight: Tensor) -> Tensor:
        both: Tensor = task.module("gate", state, x, real, weight)  # [2, b, L]
        return weight @ both

    return _mean_over_examples(task, batches, total)


def _mean_over_examples(
    task: Task, batches: Sequence[Batch], total: Callable[[Tensor, Tensor | None, Tensor], Tensor]
) -> Tensor:
    """A mean over the real examples of ``batches``; ``total`` returns a batch's weighted sum."""
    totals, counts = [], []
    for batch in batches:
        x, real, weight = _examples(task, batch)
        totals.append(total(x, real, weight))
        counts.append(weight.sum())
    return torch.stack(totals).sum(0) / torch.stack(counts).sum().clamp(min=1)


def without_single_examples(batch: Batch) -> Batch:
    """The batch; as padding, if it has only one real example, which has no batch statistics."""
    first = next(iter(batch.values()))
    if "weight" not in batch and len(first) > 1:
        return batch
    weight = batch.get("weight", torch.ones(len(first), device=first.device))
    return {**batch, "weight": weight * (weight.sum() > 1)}
