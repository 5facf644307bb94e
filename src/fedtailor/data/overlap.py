"""How alike the clients of a federation are: what their labels have in common."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .federation import Federation

_MOST = 300  # clients that are compared with each other


def label_counts(federation: Federation) -> NDArray[np.integer[Any]]:
    """Count each client's examples by class, over its three splits.

    Returns:
        ``[K, classes]``.
    """
    dataset = federation.dataset
    assert dataset.class_numbers is not None
    return federation.partition.counts(dataset.class_numbers, dataset.num_classes, slice(None))


def label_overlap(counts: NDArray[np.integer[Any]]) -> float:
    """Return what two clients' label distributions have in common, the mean over all pairs.

    It is ``sum_c min(p_c, q_c)``: 1 where the shares of all classes are the same, 0 where two
    clients share no class. In a federation of more than 300 clients, 300 evenly spread ones stand
    for all.

    Args:
        counts: the examples by class, ``[K, classes]``. Clients without an example are left out.

    >>> label_overlap(np.array([[3, 1], [1, 1], [0, 9]]))
    0.5
    """
    counts = counts[counts.sum(1) > 0]
    if len(counts) > _MOST:
        counts = counts[np.linspace(0, len(counts) - 1, _MOST).astype(int)]
    if len(counts) < 2:
        return 1.0
    shares = counts / counts.sum(1, keepdims=True)
    common = [np.minimum(shares[k], shares[k + 1 :]).sum(1) for k in range(len(shares) - 1)]
    return float(np.concatenate(common).mean())
