"""Clients' own noise: the distribution of one client's, and the sum's."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from fedtailor.uploads.chain import UploadContext
from fedtailor.uploads.collected import UploadSum
from fedtailor.uploads.secure.config import SecureAggregationConfig
from fedtailor.uploads.secure.discrete_gaussian import discrete_gaussian
from fedtailor.uploads.secure.fixed_point import FixedPoint
from fedtailor.uploads.secure.link import Secure
from fedtailor.uploads.secure.messages import Weighing
from fedtailor.uploads.secure.simulation import Simulation

SECURE = SecureAggregationConfig(0.6)  # 4 of 6 must stay
EQUAL = Weighing(lambda client: 1, lambda own, total, count: 1 / count)
LIKE = {"a": torch.zeros(200, 100), "b": torch.zeros(3)}
AT = UploadContext(7, (), lambda state, upload: state, LIKE, round=3)


@pytest.mark.slow
@pytest.mark.parametrize(("std", "count", "close"), [(1, 100_000, 1e-12), (3, 5_000, 1.0)])
def test_numbers_are_drawn_as_often_as_they_should_be(
    std: int, count: int, close: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where all probabilities are compared with 50 digits."""
    monkeypatch.setattr("fedtailor.uploads.secure.discrete_gaussian._CLOSE", close)
    draws = discrete_gaussian(np.random.default_rng(std), std, count)
    values = np.arange(-3 * std, 3 * std + 1)
    p = np.exp(-(np.arange(-12.0 * std, 12 * std + 1) ** 2) / (2 * std**2))
    expected = count * np.exp(-(values**2) / (2 * std**2)) / p.sum()
    counts = np.array([(draws == value).sum() for value in values])
    assert (((counts - expected) ** 2 / expected).sum()) < stats.chi2.isf(1e-3, len(values))


def test_no_update_gets_longer_by_whole_numbers() -> None:
    numbers = FixedPoint(8.0, 500)
    values = np.full(1000, 0.9 * numbers.step * 500)
    values[::2] *= -1
    assert not numbers.decoded(numbers.encoded(values, 1 / 500), 1 / 500).any()


def test_the_widest_noise_is_a_gaussian_to_the_eye() -> None:
    draws = discrete_gaussian(np.random.default_rng(0), 2**26, 50_000) / 2**26
    assert stats.kstest(draws, "norm").pvalue > 1e-3
    assert draws.std() == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize("left", [6, 4])
def test_the_fewest_that_may_be_left_add_enough_noise_without_the_part_of_one(
    left: int,
) -> None:
    """Through masks; clients send no update, of which the sum is the mean times the clients."""
    link = Secure(SECURE, Simulation(EQUAL), EQUAL, True, noise=0.4, method="fedavg")
    masks = link.open(replace(AT, clients=tuple(range(6))), range(6))
    total = UploadSum()
    for k in range(left):
        total.put(k, link.send(LIKE, replace(AT, clients=(k,), masks=masks[k])))
    noise = left * link.total(total.params, replace(AT, clients=tuple(range(left))))["a"].double()
    assert float(noise.std()) == pytest.approx(0.4 * math.sqrt(left / 3), rel=0.02)
    assert abs(float(noise.mean())) < 0.4 * math.sqrt(left / 3) * 4 / math.sqrt(20_000)


def test_noise_has_room_and_rounding_makes_no_update_longer() -> None:
    numbers = FixedPoint(8.0, 6, noise=1e4, least=4)
    largest = 8.0 / numbers.step + 16 * math.sqrt(6) * (numbers.noise_steps(1 / 6) + 2)
    assert largest < 2**31
    assert numbers.noise_steps(1 / 4) < 2**26
    values = np.random.default_rng(0).normal(0, 0.01, 1000)
    quiet = replace(numbers, noise=1e-30)  # of one step or so
    draws = np.random.default_rng(1), np.random.default_rng(1)
    whole = quiet.encoded(values, 1 / 6, draws[0]).view(np.int32) - discrete_gaussian(
        draws[1], 2, 1000
    )
    assert np.linalg.norm(whole * quiet.step) <= np.linalg.norm(values / 6)
    assert np.abs(whole * quiet.step - values / 6).max() <= quiet.step


def test_noise_follows_from_the_run_or_from_the_site() -> None:
    link = Secure(SECURE, Simulation(EQUAL), EQUAL, True, noise=0.4, method="fedavg")
    masks = link.open(replace(AT, clients=(0, 1, 2)), range(3))
    bare = replace(masks[0], plus=(), minus=())

    def sent(at: UploadContext = AT, client: int = 0, secret: str = "") -> torch.Tensor:
        at = replace(at, clients=(client,), masks=replace(bare, secret=secret))
        return link.send(LIKE, at)["a"]

    assert sent().equal(sent())
    others = [sent(replace(AT, round=4)), sent(replace(AT, seed=8)), sent(client=1)]
    sites = [sent(secret="one"), sent(secret="other")]
    draws = torch.stack([sent(), *others, *sites]).double().flatten(1)
    assert float(torch.corrcoef(draws).fill_diagonal_(0).abs().max()) < 0.05
