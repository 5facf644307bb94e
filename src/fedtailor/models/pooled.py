"""Text classifiers: an encoder, the pooling of its vectors to one a text, and a linear head.

Exports take this file along."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

Pooling = Literal["mean", "last"]


class Pooled(nn.Module):
    """``head(dropout(pool(encoder(text))))``; the pooling sees the mask, not the token ids.

    The encoder is what Hugging Face's ``AutoModel`` loads, under the path ``encoder``. ``mean``
    averages the real tokens' vectors, ``last`` takes the last real token's.
    """

    def __init__(
        self, encoder: nn.Module, head: nn.Linear, pooling: Pooling, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.dropout = nn.Dropout(dropout)
        self.head = head
        self.pooling = pooling

    def forward(self, input_ids: Tensor, real: Tensor, **inputs: Any) -> Tensor:
        """Return ``[b, classes]``; ``real`` ``[b, L]`` is 1 for real tokens and 0 for padding."""
        hidden = self.encoder(input_ids=input_ids, **inputs).last_hidden_state  # [b, L, d]
        pool = mean_pool if self.pooling == "mean" else last_pool
        logits: Tensor = self.head(self.dropout(pool(hidden, real)))
        return logits


def mean_pool(hidden: Tensor, real: Tensor) -> Tensor:
    """Average ``hidden`` ``[b, L, d]`` over the real tokens: ``[b, d]``, zeros without any.

    >>> mean_pool(torch.tensor([[[1.0], [3.0], [9.0]]]), torch.tensor([[1.0, 1.0, 0.0]]))
    tensor([[2.]])
    """
    weights = real.to(hidden.dtype)[:, :, None]
    return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1)


def last_pool(hidden: Tensor, real: Tensor) -> Tensor:
    """Return the vector of the last real token, ``[b, d]``; of the first one without any.

    >>> last_pool(torch.tensor([[[1.0], [3.0], [9.0]]]), torch.tensor([[1.0, 1.0, 0.0]]))
    tensor([[3.]])
    """
    positions = torch.arange(real.shape[1], device=real.device)
    last = (positions * real).argmax(1)
    return (hidden * (positions == last[:, None]).to(hidden.dtype)[:, :, None]).sum(1)
