"""One model: the base model with the client's tensors."""

from __future__ import annotations

from .base import Base


class Model(Base):
    """The model as it stands."""

    is_network_alone = True
