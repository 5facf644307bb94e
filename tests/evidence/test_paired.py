"""Pairs of scores, some of which are missing."""

import pytest
from evidence.paired import paired


def test_clients_without_a_score_in_both_are_left_out() -> None:
    ours = [{"0": 0.5, "1": 0.7, "2": 0.9}, {"0": 1.0, "3": 0.2, "4": None}, {"9": 1.0}]
    theirs = [{"0": 0.4, "1": 0.4}, {"0": 0.6, "4": 0.1, "5": 0.3}, {"9": None}]
    result = paired(ours, theirs)
    assert result.difference == pytest.approx(((0.1 + 0.3) / 2 + 0.4) / 2)
    assert (result.num_clients, result.num_seeds) == (3, 2)


@pytest.mark.parametrize(
    ("ours", "theirs"), [([{"0": 1.0}], []), ([{"0": 1.0}], [{"1": 1.0}]), ([], [])]
)
def test_scores_that_cannot_be_paired_are_refused(
    ours: list[dict[str, float]], theirs: list[dict[str, float]]
) -> None:
    with pytest.raises(ValueError, match=r"seeds|no client"):
        paired(ours, theirs)
