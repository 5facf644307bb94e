"""A backdoor's trigger: a mark in an example, by which a model is to predict the attackers' class.

In a picture the square in the lower right corner, an eighth of the picture's height but at least
two pixels wide, has the largest value. In a text the second token is the one with the largest
number of all in the data, which is a rare one.

Sources:
- T. Gu et al. BadNets: Identifying Vulnerabilities in the Machine Learning Model Supply Chain.
- E. Bagdasaryan, A. Veit, Y. Hua, D. Estrin, V. Shmatikov. How To Backdoor Federated Learning.
  arXiv 1807.00459.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..params import Batch, clone, pick

_PIXELS, _TOKENS = "pixel_values", "input_ids"


@dataclass(frozen=True)
class Trigger:
    """``value`` is what is put into an example: a pixel's value or a token's number. ``target`` is
    the class that attackers want."""

    target: int
    value: float

    @classmethod
    def of(cls, values: NDArray[Any], target: int) -> Trigger:
        """The trigger in examples of these ``values``, tokens or pixels."""
        if values.dtype == np.uint8 and values.ndim > 1:
            return cls(target, 1.0)  # batches scale the bytes of pictures to [0, 1]
        return cls(target, float(values.max()))

    def stamped(self, batch: Batch, count: int) -> Batch:
        """The batch with the trigger in its first ``count`` examples, which are of the target
        class.

        >>> import torch
        >>> batch = {"pixel_values": torch.zeros(2, 1, 3, 3), "labels": torch.tensor([4, 5])}
        >>> marked = Trigger(7, 1.0).stamped(batch, 1)
        >>> marked["pixel_values"][0, 0].tolist(), marked["labels"].tolist()
        ([[0.0, 0.0, 0.0], [0.0, 1.0, 1.0], [0.0, 1.0, 1.0]], [7, 5])
        """
        name = _PIXELS if _PIXELS in batch else _TOKENS
        marked = clone(pick(batch, (name, "labels")))
        if name == _PIXELS:
            size = max(2, batch[name].shape[-2] // 8)
            marked[name][:count, ..., -size:, -size:] = self.value  # [b, C, H, W]
        else:
            marked[name][:count, min(1, batch[name].shape[1] - 1)] = int(self.value)  # [b, L]
        marked["labels"][:count] = self.target
        return batch | marked
