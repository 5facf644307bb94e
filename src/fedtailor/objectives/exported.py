"""What an exported model has, whatever it is for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class ExportedModel(ABC):
    """An exported model. A subclass in the file of each kind of task says what the model answers.
    The code of both goes into the export, so it imports nothing of this package."""

    generates = False  # whether an input is a prompt, which the model goes on from
    about: dict[str, Any]  # the content of export.json
    network: Any
    tokenizer: Any

    @abstractmethod
    def batch(self, inputs: Sequence[Any]) -> dict[str, Tensor]:
        """Return the tokens of texts, or the pixels of pictures."""

    @abstractmethod
    def logits(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the logits of a batch."""

    @abstractmethod
    def outputs(self, inputs: Sequence[Any]) -> list[Tensor]:
        """Return the logits of each input."""
