"""A trained model inside the activation pattern of the base model (FedSQ).

The base model runs first, and its activation pattern is recorded: of a piecewise-linear activation
the piece that each value is on, of a smooth one its tangent. The trained copy then runs with this
pattern instead of its own.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from torch import Tensor

from ...layers.activation_patterns import Gates
from .base import HERE, Base, Batch


class Model(Base):
    """Both copies: the network has the base model's tensors, ``quantitative/`` are the trained."""

    def __init__(self, folder: Path | str = HERE) -> None:
        super().__init__(folder)
        self.gates = Gates(self.network, **self.settings)

    def logits(self, batch: Batch) -> Tensor:
        self.gates.replay([], partial(self.forward, batch))
        return self.forward(batch, self.part("quantitative"))
