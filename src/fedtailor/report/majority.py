"""The row beside the methods: each client's most frequent training class, on the same examples."""

from __future__ import annotations

import numpy as np

from ..store.records import EvaluationLine, Partition

NOT_LEARNED = "did not learn"  # a method whose mean is not above that of the majority class


def majority_accuracy(
    partition: Partition, evaluation: EvaluationLine
) -> list[float | None] | None:
    """Return the accuracy of each client's most frequent training class on its own test examples,
    None for a client without some; None instead of a list where it is unknown."""
    if partition.majority_correct is None or not len(evaluation.clients):
        return None
    clients = np.array(evaluation.clients)
    correct, sizes = partition.majority_correct[clients], partition.test[clients]
    if (correct < 0).any():
        return None
    return [int(c) / int(n) if n else None for c, n in zip(correct, sizes, strict=True)]
