"""The account of a client's privacy, against formulas worked out here and other accountants."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any

import dp_accounting
import numpy as np
import pytest
from scipy.integrate import quad
from scipy.optimize import brentq
from scipy.stats import norm

from fedtailor.errors import InputError
from fedtailor.uploads.accounting import Account, PrivacyConfig, account


def exact_epsilon(ratio: float, delta: float) -> float:
    """Of one Gaussian mechanism whose two outputs are ``ratio`` standard deviations apart: delta is
    the integral of what exceeds e^epsilon times the other density."""

    def excess(epsilon: float) -> float:
        start = epsilon / ratio + ratio / 2  # where the densities are so far apart
        upper = quad(norm(ratio).pdf, start, np.inf)[0]
        lower = quad(norm(0).pdf, start, np.inf)[0]
        return float(upper - math.exp(epsilon) * lower - delta)

    return float(brentq(excess, 1e-6, 60))


@pytest.mark.parametrize(("noise", "rounds", "delta"), [(4.0, 10, 1e-3), (1.5, 1, 1e-5)])
def test_all_clients_in_every_round(noise: float, rounds: int, delta: float) -> None:
    """T rounds are one in which the sum differs by 2 sqrt(T) of its noise."""
    spent = Account(noise, delta, 50, 50, rounds).spent(rounds)
    assert spent.epsilon == pytest.approx(
        exact_epsilon(2 * math.sqrt(rounds) / noise, delta), rel=1e-4
    )
    assert spent.accountant == "exact Gaussian"


def test_the_exact_epsilon_is_that_of_the_privacy_loss_distribution() -> None:
    """Which takes the noise as a multiple of the norm, and doubles that of a replaced client."""
    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    distribution = dp_accounting.pld.PLDAccountant(relation, value_discretization_interval=1e-2)
    gaussian = dp_accounting.GaussianDpEvent(20.0)
    distribution.compose(dp_accounting.SelfComposedDpEvent(gaussian, 20))
    epsilon = Account(20.0, 1e-3, 50, 50, 20).spent(20).epsilon
    assert distribution.get_epsilon(1e-3) == pytest.approx(epsilon, rel=0.01)


def test_a_sampled_cohort_spends_less_and_no_less_than_is_true() -> None:
    """One round: a replaced client is in the cohort with probability q, so that delta is at least
    that of a mixture q N(1, s) + (1 - q) N(0, s) against one with -1 in place of 1."""
    account = Account(3.0, 1e-3, 100, 10, 20)
    assert account.accountant == "RDP, sampling without replacement"
    whole = Account(3.0, 1e-3, 100, 100, 20)
    for rounds in (1, 20):
        assert account.spent(rounds).epsilon < whole.spent(rounds).epsilon
    epsilon, q, s = account.spent(1).epsilon, 0.1, 3.0

    def excess(x: float) -> float:
        a, b = (q * norm.pdf(x, m, s) + (1 - q) * norm.pdf(x, 0, s) for m in (1, -1))
        return float(max(0.0, a - math.exp(epsilon) * b))

    assert quad(excess, -40, 40, limit=200)[0] <= 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("neighbours", ["replace", "remove"])
def test_a_round_of_a_poisson_cohort(neighbours: Any) -> None:
    """Delta is the integral of what exceeds e^epsilon times the other density, of mixtures of a
    client that is drawn with probability q: it pushes the sum to 1, or to -1, or not at all."""
    one = Account(1.5, 1e-3, 400, 40, 1, True, neighbours)
    epsilon, q, s = one.spent(1).epsilon, 0.1, 1.5
    others = (-1,) if neighbours == "replace" else (0,)

    def excess(x: float, first: int, second: int) -> float:
        a, b = (q * norm.pdf(x, m, s) + (1 - q) * norm.pdf(x, 0, s) for m in (first, second))
        return float(max(0.0, a - math.exp(epsilon) * b))

    found = max(
        quad(excess, -30, 30, args=pair, limit=400)[0]
        for other in others
        for pair in ((1, other), (other, 1))
    )
    assert found == pytest.approx(1e-3, rel=0.01)
    assert one.accountant == "PLD, Poisson sampling"


def test_hardly_any_noise_is_counted_on_a_coarser_grid() -> None:
    """Of four rounds a client is in three with a probability above delta, which is 0.037, and not
    in all: three times the loss of 1 / (2 noise^2)."""
    found = account(PrivacyConfig(noise=0.01, clip=1.0, sampling="poisson"), 20, 7, 4)
    assert found.epsilon(4) == pytest.approx(3 / (2 * 0.01**2), rel=0.02)


def test_many_rounds_of_poisson_cohorts_as_prv_accountant_has_them() -> None:
    """It says that q = 0.05 and sigma = 1 spend 10.987 in 1,000 rounds: tests/oracles."""
    spent = Account(1.0, 1e-5, 10_000, 500, 1000, True, "remove").spent(1000)
    assert spent.epsilon == pytest.approx(10.987, abs=0.01)


def test_rounds_of_nobody_have_a_part_of_delta() -> None:
    """A cohort of 5 of 50 is empty once in 194 rounds."""
    many, few = (Account(2.0, 0.02, clients, clients // 10, 30, True) for clients in (5000, 50))
    assert many.spent(30).epsilon < few.spent(30).epsilon
    left = 0.02 - 30 * 0.1 * 0.9**49
    assert few.spent(30).epsilon == pytest.approx(replace(many, delta=left).spent(30).epsilon)
    with pytest.raises(InputError, match="a cohort of 2 of 50 clients is empty so often"):
        account(PrivacyConfig(noise=1.0, clip=1.0, sampling="poisson"), 50, 2, 30)


def test_a_client_that_is_left_out_changes_the_sum_half_as_much() -> None:
    replaced, left_out = (Account(noise, 1e-3, 50, 50, 9, False, n) for noise, n in NEIGHBOURS)
    assert replaced.spent(9).epsilon == left_out.spent(9).epsilon
    assert "whose data are left out (exact Gaussian)" in left_out.words(1.0)


NEIGHBOURS: Any = ((4.0, "replace"), (2.0, "remove"))


def test_a_budget_that_the_rounds_exceed_names_how_many_fit() -> None:
    config = PrivacyConfig(epsilon=8.0, noise=4.0, clip=1.0)
    with pytest.raises(InputError, match=r"privacy\.noise = 4 spends .* in 60 rounds") as error:
        account(config, 100, 100, 60)
    most = int(str(error.value).partition("rounds up to ")[2].partition(" ")[0])
    assert account(config, 100, 100, most).spent(most).epsilon <= 8.0
    with pytest.raises(InputError, match="spends epsilon"):
        account(config, 100, 100, most + 1)


@pytest.mark.slow
def test_renyi_divergences_are_those_of_one_composition() -> None:
    """Rounds are added up here; the package's accountant composes them."""
    package: Any = dp_accounting
    one = Account(6.0, 1e-3, 100, 5, 40)
    accountant = package.rdp.RdpAccountant(range(2, 101), package.NeighboringRelation.REPLACE_ONE)
    event = package.SampledWithoutReplacementDpEvent(100, 5, package.GaussianDpEvent(3.0))
    accountant.compose(event, 40)
    assert one.spent(40).epsilon == pytest.approx(accountant.get_epsilon(1e-3), rel=0.01)


@pytest.mark.parametrize(
    ("clients", "cohort", "sampling"),
    [
        (100, 100, "fixed"),
        pytest.param(100, 10, "fixed", marks=pytest.mark.slow),
        pytest.param(400, 80, "poisson", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("epsilon", [1.0, 8.0])
def test_noise_that_is_solved_for_spends_what_was_asked(
    clients: int, cohort: int, sampling: Any, epsilon: float
) -> None:
    config = PrivacyConfig(epsilon=epsilon, clip=1.0, sampling=sampling)
    found = account(config, clients, cohort, 30)
    assert found.delta == pytest.approx(clients**-1.1)
    by_round = [found.spent(number).epsilon for number in range(1, 31)]
    assert by_round == sorted(by_round)
    assert 0.995 * epsilon < by_round[-1] <= epsilon


def test_where_sampling_gains_nothing_the_bound_of_all_clients_counts() -> None:
    account = Account(3.0, 1e-3, 100, 90, 5)
    assert account.spent(5) == Account(3.0, 1e-3, 100, 100, 5).spent(5)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"epsilon": 8.0}, "privacy.clip is missing"),
        ({"clip": 1.0}, "privacy has neither epsilon nor noise"),
        ({"delta": 1e-5}, "privacy has neither epsilon nor noise"),
        ({"secret": False}, "privacy has neither epsilon nor noise"),
        ({"epsilon": 8.0, "clip": 1.0, "stop": "budget"}, r"needs privacy\.noise, too"),
        ({"noise": 1.0, "clip": 1.0, "stop": "budget"}, r"needs privacy\.epsilon, too"),
    ],
)
def test_settings_that_say_too_little_or_too_much(fields: dict[str, float], said: str) -> None:
    with pytest.raises(InputError, match=said):
        PrivacyConfig(**fields)


def test_all_clients_are_not_drawn_by_chance() -> None:
    with pytest.raises(InputError, match=r"'poisson', but cohort\.fraction = 1 draws all clients"):
        account(PrivacyConfig(noise=1.0, clip=1.0, sampling="poisson"), 9, 9, 5)


def test_chance_gains_nothing_where_it_is_known_who_is_drawn() -> None:
    """To the server, or to clients that mask with those who are drawn."""
    config = PrivacyConfig(noise=4.0, clip=1.0, delta=1e-3, noise_by="clients")
    known, all_ = account(config, 100, 10, 50), account(config, 100, 100, 50)
    by_server = replace(config, noise_by="server")
    masked = account(by_server, 100, 10, 50, masked=True)
    assert known.spent(50).epsilon == masked.spent(50).epsilon == all_.spent(50).epsilon
    assert account(by_server, 100, 10, 50).spent(50).epsilon < 5
    with pytest.raises(InputError, match=r"'poisson' does not go with \[secure_aggregation\]"):
        account(replace(by_server, sampling="poisson"), 100, 10, 50, masked=True)
    asked = replace(config, noise=None, epsilon=known.spent(50).epsilon)
    assert account(asked, 100, 10, 50).noise == pytest.approx(4.0, rel=1e-3)


def test_one_client_has_no_privacy_in_a_crowd() -> None:
    with pytest.raises(InputError, match="privacy needs two clients or more; 1 takes part"):
        account(PrivacyConfig(noise=1.0, clip=1.0), 1, 1, 5)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(InputError, match=r"pip install 'fedtailor\[privacy\]'"):
        account(PrivacyConfig(epsilon=3.3, clip=1.0), 7, 7, 3)
