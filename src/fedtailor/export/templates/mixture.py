"""Several models, whose predicted distributions are mixed by fixed weights (FedEM).

log sum_m pi_m softmax(h_m(x)), h_m the models and pi the client's weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Base, Batch


class Model(Base):
    """The mixture; the logits are log probabilities."""

    def logits(self, batch: Batch) -> Tensor:
        log_pi = self.tensors["/pi"].log()  # [M]
        models = [self.forward(batch, self.part(str(m))) for m in range(len(log_pi))]
        each = [log + torch.log_softmax(h, -1) for log, h in zip(log_pi, models, strict=True)]
        return torch.logsumexp(torch.stack(each), 0)
