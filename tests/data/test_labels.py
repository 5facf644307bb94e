import numpy as np

from fedtailor.data.federation import Federation
from fedtailor.data.labels import majority_class
from fedtailor.data.table import Partition, Shares
from tests.data.small import table


def test_the_training_rows_decide_and_the_test_rows_count() -> None:
    dataset = table([0, 0, 1, 1, 0, 0, 2, 2, 1, 2, 2, 2])
    train, validation, test = (
        Shares.of([np.array(rows) for rows in lists])
        for lists in (
            [[0, 2], [6, 7, 8], [5]],
            [[1], [3], []],
            [[4], [9, 10, 11], []],
        )
    )
    federation = Federation(dataset, Partition(train, validation, test, ""))
    majority, correct = majority_class(federation, [0, 1])
    assert majority.tolist() == [0, 2, -1]  # of client 0's classes 0 and 1 the first
    assert correct.tolist() == [1, 3, -1]
    majority, correct = majority_class(federation, [2])
    assert (majority[2], correct[2]) == (0, 0)
