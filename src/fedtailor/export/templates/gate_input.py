"""What a gate sees of a batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional as F

Batch = dict[str, Tensor]


def gate_input(
    about: Mapping[str, Any], inputs: Mapping[str, Any], batch: Batch, embedding: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return what the gate sees, ``[b, C, P]``, and which positions are real (None: all).

    Args:
        about: the kind of the input, its channels C and positions P.
        inputs: the arguments of the network's forward.
        batch: the examples.
        embedding: of tokens, ``[vocabulary, C]``; None for pictures and vectors.
    """
    if embedding is not None:
        real = batch["attention_mask"].flatten(1)  # one after the other if several sequences
        return F.embedding(inputs["input_ids"].reshape(real.shape), embedding).mT, real.float()
    axes = 4 if about["kind"] == "pictures" else 2
    x = next(v for v in inputs.values() if isinstance(v, Tensor) and v.dim() == axes)
    if axes == 2:
        return x[:, None], None
    side = math.isqrt(about["positions"])
    return F.adaptive_avg_pool2d(x, side).flatten(2), None


def average(x: Tensor, real: Tensor | None) -> Tensor:
    """Return the mean over the real positions, ``[b, C, 1]``."""
    if real is None:
        return x.mean(2, keepdim=True)
    return (x @ real[:, :, None]) / real.sum(1).clamp(min=1)[:, None, None]
