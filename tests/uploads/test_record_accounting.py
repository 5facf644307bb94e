"""The account of a record's privacy, against other accountants and worked-out cases."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from fedtailor.data.config import LocalConfig
from fedtailor.errors import InputError
from fedtailor.uploads.accounting import PrivacyConfig
from fedtailor.uploads.record_accounting import RecordAccount, record_account
from tests.small import digits_federation
from tests.uploads.test_accounting import exact_epsilon


def test_it_agrees_with_another_accountant() -> None:
    """prv-accountant says 10.987 here: tests/oracles."""
    account = RecordAccount(1.0, 1e-5, 1000, 0.05, 100, 10)
    assert 10.98 < account.spent(10).epsilon < 11.0
    assert account.spent(5).epsilon < 0.8 * account.spent(10).epsilon
    assert account.bound(10) >= account.spent(10).epsilon


def test_without_sampling_it_is_one_gaussian_mechanism() -> None:
    account = RecordAccount(5.0, 1e-3, 10, 1.0, 4, 6)
    assert account.spent(6).epsilon == pytest.approx(
        exact_epsilon(math.sqrt(24) / 5.0, 1e-3), rel=2e-3
    )


def test_two_steps_on_a_batch_with_more_noise_tell_no_more_than_one() -> None:
    """Two looks at a record that is in the batch or not, each with sqrt(2) of the noise: delta at
    an epsilon is an integral over both, and over their mean."""
    q, sigma, epsilon = 0.3, 1.5, 0.4

    def delta_of_one() -> float:
        def excess(x: float) -> float:
            p0 = norm.pdf(x, 0, sigma)
            p1 = (1 - q) * p0 + q * norm.pdf(x, 1, sigma)
            return float(max(0.0, p1 - math.exp(epsilon) * p0))

        return float(quad(excess, -15, 20, limit=200)[0])

    wide = sigma * math.sqrt(2)
    grid = np.linspace(-12, 14, 1001)
    x, y = np.meshgrid(grid, grid)
    p0 = norm.pdf(x, 0, wide) * norm.pdf(y, 0, wide)
    p1 = (1 - q) * p0 + q * norm.pdf(x, 1, wide) * norm.pdf(y, 1, wide)
    delta = np.maximum(p1 - math.exp(epsilon) * p0, 0).sum() * (grid[1] - grid[0]) ** 2
    assert delta == pytest.approx(delta_of_one(), rel=1e-3)


def test_the_client_that_spends_the_most_counts() -> None:
    """With a whole number of batches the smallest one; one record more than that is a step more."""
    config = PrivacyConfig("record", noise=1.0, clip=1.0)
    kinds = digits_federation((40, 8, 16, 24)).sampling(LocalConfig(batch_size=8, epochs=2))
    assert kinds == ((8, 1.0, 2), (16, 0.5, 4), (24, 8 / 24, 6), (40, 0.2, 10))
    assert record_account(config, kinds, 5).records == 8
    kinds = digits_federation((40, 8, 9)).sampling(LocalConfig(batch_size=8))
    found = record_account(config, kinds, 5)
    assert found.delta == 40**-1.1  # the same for all, so that none spends more at it
    others = [RecordAccount(1.0, found.delta, n, q, steps, 5) for n, q, steps in kinds]
    assert found.spent(5).epsilon == max(one.spent(5).epsilon for one in others)


@pytest.mark.parametrize("epsilon", [pytest.param(1.0, marks=pytest.mark.slow), 8.0])
def test_noise_that_is_solved_for_spends_what_was_asked(epsilon: float) -> None:
    kinds = ((8, 1.0, 1), (9, 8 / 9, 2), (100, 0.08, 13))
    found = record_account(PrivacyConfig("record", epsilon=epsilon, clip=1.0), kinds, 10)
    assert 0.995 * epsilon < found.spent(10).epsilon <= epsilon
    for n, q, steps in kinds:
        account = RecordAccount(found.noise, 100**-1.1, n, q, steps, 10)
        assert account.spent(10).epsilon <= epsilon


def test_a_budget_that_the_noise_does_not_keep_is_refused() -> None:
    both = PrivacyConfig("record", epsilon=2.0, noise=1.0, clip=1.0)
    with pytest.raises(InputError, match=r"privacy.noise = 1 spends epsilon \d.* in 10 rounds"):
        record_account(both, ((100, 0.08, 13),), 10)
    assert record_account(both, ((100, 0.01, 1),), 10).noise == 1.0


def test_tiny_noise_has_a_bound() -> None:
    spent = RecordAccount(0.02, 1e-3, 100, 0.5, 100, 100).spent(100)
    assert spent.epsilon > 1e6
    assert spent.accountant == "RDP, Poisson sampling"


def test_clients_with_one_record_each_need_a_delta() -> None:
    with pytest.raises(InputError, match=r"none has two; set privacy\.delta, or raise split"):
        record_account(PrivacyConfig("record", noise=1.0, clip=1.0), ((1, 1.0, 1),), 5)
    given = PrivacyConfig("record", noise=1.0, clip=1.0, delta=0.1)
    assert record_account(given, ((1, 1.0, 1),), 5).delta == 0.1
