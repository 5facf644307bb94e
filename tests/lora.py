"""LoRA on one linear layer by hand, in NumPy, for the golden tests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tests.golden import softmax_gradient

F64 = NDArray[np.float64]
A, B = "linear.lora_A.default.weight", "linear.lora_B.default.weight"  # of `linear_backbone`
W = np.array([[0.1, -0.2], [0.3, 0.4], [-0.5, 0.2]], dtype=np.float32)


def lora_steps(
    w: F64, a: F64, b: F64, s: float, x: F64, y: NDArray[np.int64], eta: float, steps: int = 3
) -> tuple[F64, F64]:
    """Gradient steps on A and B of the softmax regression with weight w + s B A."""
    for _ in range(steps):
        g = softmax_gradient(w + s * b @ a, x, y)
        a, b = a - eta * s * b.T @ g, b - eta * s * g @ a.T
    return a, b


def truncated(m: F64, rank: int) -> F64:
    """The best approximation of rank ``rank``."""
    u, s, v = np.linalg.svd(m, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ v[:rank]
