"""What a gating layer sees of a batch, and the moments of it; exports take this file along."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import InputError

Batch = dict[str, Tensor]

_EPS = 1e-5


@dataclass(frozen=True)
class GateInput:
    """What a gating layer sees of a batch, by the kind of the model's first layer with weights.

    ``path`` leads to that layer.
    """

    kind: Literal["tokens", "pictures", "vectors"]
    path: str
    channels: int
    positions: int  # after pooling; 1 for tokens, which are averaged

    @classmethod
    def of(cls, model: nn.Module, name: str, pool: int) -> GateInput:
        """Find it in a ``model`` of this ``name``; pictures are averaged to ``pool`` x ``pool``."""
        for path, module in model.named_modules():
            if isinstance(module, nn.Embedding):
                return cls("tokens", path, module.embedding_dim, 1)
            if isinstance(module, nn.Conv2d):
                return cls("pictures", path, module.in_channels, pool * pool)
            if isinstance(module, nn.Linear):
                return cls("vectors", path, 1, module.in_features)
        raise InputError(
            f"the gate can't tell what {name!r} reads; its first layer with weights must "
            f"be an nn.Embedding (tokens), an nn.Conv2d (pictures) or an nn.Linear (vectors)"
        )

    def read(
        self, inputs: Mapping[str, Any], batch: Batch, embedding: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return what the gate sees, float32 ``[b, C, P]``, and which positions are real,
        ``[b, P]`` (None: all).

        Args:
            inputs: the arguments of the model's forward.
            batch: the examples.
            embedding: of tokens, ``[vocabulary, C]``; None for pictures and vectors.

        Raises:
            InputError: there is no input of this kind and size.
        """
        if embedding is not None:
            real = batch["attention_mask"].flatten(1)  # one after the other if several sequences
            x = F.embedding(inputs["input_ids"].reshape(real.shape), embedding).float().mT
            return x, real.to(x.dtype)
        axes = 4 if self.kind == "pictures" else 2
        fitting = [v for v in inputs.values() if isinstance(v, Tensor) and v.dim() == axes]
        if not fitting or not fitting[0].is_floating_point():
            received = ", ".join(f"{name} {tuple(batch[name].shape)}" for name in batch)
            raise InputError(
                f"the gating layer reads {self.kind} for this model, and the batch has "
                f"{received}; it takes tokens, pictures [b, C, H, W] and vectors [b, d]"
            )
        x = fitting[0]
        if self.kind == "pictures":
            side = math.isqrt(self.positions)
            x = (x if x.shape[2:] == (side, side) else F.adaptive_avg_pool2d(x, side)).flatten(2)
        else:
            x = x[:, None]
        if x.shape[1:] != (self.channels, self.positions):
            raise InputError(
                f"the gating layer reads {self.kind} with {self.channels} channels and "
                f"{self.positions} positions, and the batch has {tuple(fitting[0].shape[1:])}; all "
                "clients need inputs of one size"
            )
        return x, None


def average(x: Tensor, real: Tensor | None) -> Tensor:
    """Return the mean over the real positions, ``[b, C, 1]``."""
    if real is None:
        return x.mean(2, keepdim=True)
    count = real.sum(1).clamp(min=1)
    return (x @ real[:, :, None]) / count[:, None, None]


def pooled(x: Tensor, real: Tensor | None, *, so_far: bool = False) -> Tensor:
    """Return one vector of each example, ``[b, C * P]``; of tokens, whose real positions are known,
    the mean, ``[b, C]``, or with ``so_far`` the mean up to each of them, ``[b, P, C]``."""
    if real is None:
        return x.flatten(1)
    if not so_far:
        return average(x, real)[:, :, 0]
    total = (x * real[:, None]).cumsum(2)
    return (total / real.cumsum(1).clamp(min=1)[:, None]).mT


def moments(x: Tensor, real: Tensor | None) -> tuple[Tensor, ...]:
    """Return how many positions of each example are real ``[b]``, the means ``[b, C]`` and the
    variances of its channels, and those of all of its channels together ``[b, 1]``."""
    if real is None:
        count = x.new_full((len(x),), x.shape[2])
        mean = x.mean(2)
        var = (x - mean[:, :, None]).square().mean(2)  # much faster than torch.var_mean
    else:
        count = real.sum(1).clamp(min=1)
        mean = (x * real[:, None]).sum(2) / count[:, None]
        var = ((x - mean[:, :, None]).square() * real[:, None]).sum(2) / count[:, None]
    square = var + mean.square()
    mean_ln = mean.mean(1, keepdim=True)
    var_ln = (square.mean(1, keepdim=True) - mean_ln.square()).clamp(min=0)
    return count, mean, var, mean_ln, var_ln


def normalisation(
    means: Sequence[Tensor], variances: Sequence[Tensor], learned: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """Return the scale and the shift of a switchable normalisation, each ``[2, b, C]``, from the
    moments by instance ``[b, C]``, layer and batch, mixed by softmax weights, and what is
    ``learned``, by name."""
    mean, var = (
        torch.tensordot(
            learned[name].softmax(1), torch.stack([one.expand_as(moments[0]) for one in moments]), 1
        )
        for name, moments in (("mean_weight", means), ("var_weight", variances))
    )
    scale = torch.rsqrt(var + _EPS) * learned["weight"][:, None]
    return scale, learned["bias"][:, None] - mean * scale
