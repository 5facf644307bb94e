"""One model: the base model with the client's tensors."""

from __future__ import annotations

from torch import Tensor

from .base import Base, Batch


class Model(Base):
    """The model as it stands."""

    is_network_alone = True

    def logits(self, batch: Batch) -> Tensor:
        return self.forward(batch)
