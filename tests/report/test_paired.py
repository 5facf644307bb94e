"""Paired differences against numbers worked out by hand."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from fedtailor.errors import InputError
from fedtailor.report.comparison import against
from fedtailor.report.differences import Difference, MethodResults, interval_of
from tests.report.written import ALONE, around, written

Scores = Sequence[Mapping[str, float]]  # by client, for each seed


def _lead(ours: Scores, theirs: Scores, *, has_names: bool = False) -> Difference | None:
    """How far a method with these scores is ahead of another one."""

    def results(label: str, scores: Scores) -> MethodResults:
        by_division = {(seed, "data", "digest"): of for seed, of in enumerate(scores)}
        none = dict.fromkeys(by_division, 0)
        return MethodResults(
            label, by_division, none, has_names, dict.fromkeys(by_division, ()), True
        )

    return results("ours", ours).ahead(results("theirs", theirs))


def test_the_difference_is_the_mean_over_seeds_of_means_over_clients() -> None:
    ours = [{"0": 0.5, "1": 0.7, "2": 0.9}, {"0": 1.0, "3": 0.2}]
    theirs = [{"0": 0.4, "1": 0.4}, {"0": 0.6, "4": 0.1, "5": 0.3}]
    result = _lead(ours, theirs)
    assert result is not None
    assert result.value == pytest.approx(((0.1 + 0.3) / 2 + 0.4) / 2)
    assert (result.num_clients, result.num_seeds) == (3, 2)


def test_the_interval_of_one_seed_is_that_of_a_mean_over_clients() -> None:
    # 400 clients with differences of 0 and 1, half of each: the standard error is 1/2 / sqrt(400)
    low, high = interval_of([{str(k): float(k % 2) for k in range(400)}], draws=10_000)
    assert low == pytest.approx(0.5 - 1.96 * 0.025, abs=3e-3)
    assert high == pytest.approx(0.5 + 1.96 * 0.025, abs=3e-3)


def test_seeds_that_disagree_widen_the_interval() -> None:
    # each seed's clients agree, so a draw is the mean of three seeds drawn from -1, 0 and 1; all
    # three are the lowest with probability 1/27, which is more than 2.5 %
    result = _lead([{"0": d, "1": d} for d in (-1.0, 0.0, 1.0)], [{"0": 0.0, "1": 0.0}] * 3)
    assert result is not None
    assert (result.low, result.value, result.high) == (-1.0, 0.0, 1.0)


def test_the_same_seed_gives_the_same_interval() -> None:
    scores = [{str(k): math.sin(k) for k in range(20)}]
    assert interval_of(scores) == interval_of(scores)
    assert interval_of(scores, seed=1)[0] != interval_of(scores)[0]
    assert np.isclose(interval_of([dict.fromkeys(scores[0], 0.0)])[1], 0.0)


@pytest.mark.parametrize(
    ("ours", "theirs"), [([{"0": 1.0}], []), ([{"0": 1.0}], [{"1": 1.0}]), ([], [])]
)
def test_scores_that_cannot_be_paired_have_no_difference(ours: Scores, theirs: Scores) -> None:
    assert _lead(ours, theirs) is None


@pytest.mark.slow
def test_clients_that_come_again_with_every_seed_are_drawn_once() -> None:
    # 100 clients, half of them ahead by 1, the same with every seed: nine seeds tell no more of the
    # clients than one seed
    one = {str(k): float(k % 2) for k in range(100)}
    low, high = interval_of([one] * 9, same_clients=True, draws=10_000)
    assert high - low == pytest.approx(2 * 1.96 * 0.05, abs=0.01)
    low, high = interval_of([one] * 9, draws=10_000)
    assert high - low == pytest.approx(2 * 1.96 * 0.05 / 3, abs=0.01)


def test_a_client_that_lacks_a_score_with_a_seed_counts_with_the_others() -> None:
    result = _lead([{"a": 1.0, "b": 1.0}, {"a": 1.0}], [{"a": 0.0, "b": 0.0}] * 2, has_names=True)
    assert result is not None
    assert (result.low, result.value, result.high) == (1.0, 1.0, 1.0)
    assert (result.num_clients, result.num_seeds) == (2, 2)


def test_many_clients_have_the_interval_of_a_mean() -> None:
    low, high = interval_of([{str(k): float(k % 2) for k in range(10_000)}], draws=10_000)
    assert high - low == pytest.approx(2 * 1.96 * 0.005, abs=1e-3)


def test_methods_with_other_clients_are_named(tmp_path: Path) -> None:
    one = written(tmp_path / "one", {"local": ALONE, "ditto": around(0.7)})
    other = written(tmp_path / "other", {"apfl": around(0.8)}, digest="e")
    text = against([one, other], "local")
    assert text.splitlines()[-1] == "Without results on the same clients: apfl"
    assert "ditto" in text
    for runs, said in (([other], ""), ([one, other], "; not local, ditto")):
        with pytest.raises(InputError) as refused:
            against(runs, "apfl", as_json=True)
        words = "--against apfl: no other method has results on the same clients"
        assert str(refused.value) == words + said
