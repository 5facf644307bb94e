"""Networks of one's own for texts; an export has a copy of this file."""

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """Logits of each text, the mean over its tokens; with ``by_token`` of each token."""

    def __init__(self, outputs: int, *, by_token: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.body, self.head = nn.Embedding(30522, 8), nn.Linear(8, outputs)
        self.by_token = by_token

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.body(input_ids) * attention_mask[..., None]
        logits: Tensor = self.head(hidden if self.by_token else hidden.mean(1))
        return logits


class WithTypes(Net):
    """The same, but it is told which of a pair's texts a token is of."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> Tensor:
        logits: Tensor = super().forward(input_ids, attention_mask * (1 + token_type_ids))
        return logits
