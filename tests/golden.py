"""What the golden tests share: a model small enough to differentiate by hand."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedtailor.task import Backbone


class Linear(nn.Module):
    """Logits W x, without a bias."""

    def __init__(self, weight: NDArray[np.float32]) -> None:
        super().__init__()
        self.linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        self.linear.weight = nn.Parameter(torch.tensor(weight))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def linear_backbone(weight: NDArray[np.float32]) -> Backbone:
    """One block, one projection, no head: what an adapter method changes is the adapter alone."""
    return Backbone(Linear(weight), blocks=(("linear",),))


def softmax(z: NDArray[np.float64]) -> NDArray[np.float64]:
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def logit_gradient(z: NDArray[np.float64], y: NDArray[np.int64]) -> NDArray[np.float64]:
    """d(mean cross-entropy) / dz, ``[n, classes]``."""
    return (softmax(z) - np.eye(z.shape[1])[y]) / len(y)


def softmax_gradient(
    w: NDArray[np.float64], x: NDArray[np.float64], y: NDArray[np.int64]
) -> NDArray[np.float64]:
    """d(mean cross-entropy of W x) / dW."""
    return logit_gradient(x @ w.T, y).T @ x
