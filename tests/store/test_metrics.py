import math

import numpy as np
import pytest

from fedtailor.errors import InputError
from fedtailor.store.metrics import best_round, sizes_of, summarise, summary
from fedtailor.store.records import EvaluationLine


def test_summary_leaves_out_clients_without_examples() -> None:
    found = summarise([0.9, None, 0.3, 0.6, 0.5], [10, 0, 30, 20, None], higher_is_better=True)
    assert found.mean == pytest.approx(0.6)
    assert found.weighted == pytest.approx((9 + 9 + 12) / 60)
    assert found.std == pytest.approx(math.sqrt((0.09 + 0.09 + 0.0) / 3))
    assert (found.worst, found.bottom_decile) == (0.3, 0.3)
    assert (found.clients, found.without_examples) == (3, 2)


@pytest.mark.parametrize("clients", [1, 9, 10, 25])
def test_bottom_decile_is_counted_from_the_worst(clients: int) -> None:
    values = np.random.default_rng(0).permutation(clients).astype(float)
    count = [1] * clients
    low = summarise(values.tolist(), count, higher_is_better=True)
    high = summarise(values.tolist(), count, higher_is_better=False)
    assert (low.worst, low.bottom_decile) == (0, clients // 10)
    assert (high.worst, high.bottom_decile) == (clients - 1, clients - 1 - clients // 10)


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_a_missing_value_with_examples_is_the_worst(higher_is_better: bool) -> None:
    found = summarise([0.5, None, 0.7], [1, 1, 1], higher_is_better=higher_is_better)
    assert math.isnan(found.worst)
    assert math.isnan(found.mean)
    assert found.clients == 3


def test_a_client_that_diverged_is_no_number_and_not_undefined() -> None:
    f1 = [0.5, None, None]
    line = EvaluationLine(
        1, "personal", "test", [0, 1, 2], [4, 4, 4], loss=[0.5, 0.5, None], accuracy=f1,
        metrics={"f1": f1},
    )  # fmt: skip
    assert sizes_of(line, "f1") == [4, 0, 4]
    assert math.isnan(summary(line, "f1").mean)


def test_no_examples_at_all_is_refused() -> None:
    with pytest.raises(InputError, match="none of 2 clients has examples"):
        summarise([None, None], [0, 0], higher_is_better=True)


def test_best_round_is_the_earliest_of_equals() -> None:
    means = {10: 0.5, 5: 0.5, 0: 0.1, 15: math.nan}
    assert best_round(means, "accuracy") == 5
    assert best_round(means, "loss") == 0
    assert best_round({3: math.nan, 2: math.nan}, "accuracy") == 3
