"""Cohort sizes, learning rates and evaluations by round."""

import numpy as np
import pytest

from fedtailor.engine.config import CohortConfig, EvaluateConfig, Plan, ScheduleConfig


def test_cohort_sizes() -> None:
    assert CohortConfig(fraction=0.1).count(100) == 10
    assert CohortConfig(fraction=0.001).count(100) == 1
    assert CohortConfig(size=7).count(5) == 5


def test_schedules() -> None:
    warm = ScheduleConfig("cosine", final=0.1, warmup_rounds=2)
    factors = [warm.factor(t, 12) for t in range(1, 13)]
    assert factors[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert 0.1 < factors[-1] < 0.15
    assert factors[2:] == sorted(factors[2:], reverse=True)
    assert ScheduleConfig().factor(5, 9) == 1.0
    assert ScheduleConfig("linear").factor(3, 4) == pytest.approx(0.5)


def test_rates_within_rounds_move_on_where_the_last_round_ended() -> None:
    plan = Plan(4, schedule=ScheduleConfig("linear", final=0.2, within_rounds=True))
    ends = [
        (scale * (1 - slope / 2), scale * (1 + slope / 2))
        for scale, slope in ((plan.lr_scale([t]), plan.lr_slope([t])) for t in (1, 2, 3, 4))
    ]
    assert np.array(ends) == pytest.approx(np.array([(1, 0.8), (0.8, 0.6), (0.6, 0.4), (0.4, 0.2)]))
    assert plan.lr_scale([3, 4]) == pytest.approx(0.4)  # a turn that stands for both
    assert plan.lr_slope([3, 4]) == pytest.approx(-0.4 / 0.4)


def test_the_last_round_is_evaluated_whatever_the_interval() -> None:
    config = EvaluateConfig(every=3)
    assert [number for number in range(1, 9) if config.due(number, 8)] == [3, 6, 8]
    assert [number for number in range(1, 4) if EvaluateConfig().due(number, 3)] == [1, 2, 3]
