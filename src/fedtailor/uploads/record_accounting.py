"""How much of a record's privacy a client's steps spend, by the package dp-accounting.

Neighbours are two data sets of a client that are the same but for one record, whose place is empty
in one of them. A step has each of n records with probability q = min(1, batch_size / n), the
gradient of each has a norm of at most C, and the noise on their sum a standard deviation of
sigma C: the Poisson-subsampled Gaussian mechanism. A client does all steps of all rounds at most.

Where a method takes m steps on a batch, each has noise of sqrt(m) sigma: whoever knows m values
b + sqrt(m) sigma N(0, 1), where b is 1 if the record was drawn and else 0, can work out the steps,
and the mean of those values, b + sigma N(0, 1), tells as much.

Epsilon is that of the privacy loss distribution (PLD), rounded up to a grid. Renyi differential
privacy (RDP) bounds it: that says of which clients it need not be worked out, and stands in for a
very large one.

Sources:
- S. Meiser, E. Mohammadi. Tight on Budget? Tight Bounds for r-Fold Approximate Differential
  Privacy. CCS 2018.
- A. Koskela, J. Jaelkoe, A. Honkela. Computing Tight Differential Privacy Guarantees Using FFT.
  AISTATS 2020.
- I. Mironov, K. Talwar, L. Zhang. Renyi Differential Privacy of the Sampled Gaussian Mechanism.
  arXiv 1908.10530, 2019.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from ..errors import InputError
from ..units import counted
from .accounting import _ORDERS, PrivacyConfig, Spent, _package, check_budget, least_noise

_PLD, _RENYI = "PLD, Poisson sampling", "RDP, Poisson sampling"
_POWER = 1.1  # delta is n^-1.1, if it isn't given
_LARGE = 300.0  # an epsilon of which its distribution would take much memory, and gain little
# what a grid of privacy losses may add to epsilon, as a part of it: about steps * grid^2 / 4, of
# which the constant was measured
_ERROR = 5e-4


@dataclass(frozen=True)
class RecordAccount:
    """What a client spends that does so many ``steps`` a round on batches of its ``records``, each
    of which is drawn with probability ``rate``, in all of ``rounds``."""

    noise: float
    delta: float
    records: int
    rate: float
    steps: int
    rounds: int

    def spent(self, rounds: int) -> Spent:
        """What the first ``rounds`` spend."""
        epsilon = self.bound(rounds)
        if epsilon > _LARGE:
            return Spent(epsilon, self.delta, self.noise, _RENYI, "record")
        epsilon = _epsilon(self.rate, self.noise, rounds * self.steps, self.delta, epsilon)
        return Spent(epsilon, self.delta, self.noise, _PLD, "record")

    def words(self, clip: float) -> str:
        spent = self.spent(self.rounds)
        return (
            f"epsilon {spent.epsilon:.4g} at delta {self.delta:.3g} after "
            f"{counted(self.rounds, 'round')}, of a record that is there or not "
            f"({spent.accountant}), for the client that spends the most: {self.records} records, "
            f"{counted(self.steps, 'step')} a round; gradients of a norm up to {clip:g}, noise "
            f"{self.noise:g}"
        )

    @property
    def usual_delta(self) -> str:
        most = round(self.delta ** (-1 / _POWER))
        return f"delta is {most}^-{_POWER}, by the records of the client that has the most"

    def bound(self, rounds: int) -> float:
        """No less than epsilon; quicker to work out."""
        return _bound(self.rate, self.noise, rounds * self.steps, self.delta)


@cache
def record_account(
    config: PrivacyConfig, clients: tuple[tuple[int, float, int], ...], rounds: int
) -> RecordAccount:
    """The account of the client that spends the most in ``rounds``; the noise is the least one, to
    four digits, where epsilon alone is given. ``clients`` are by kind its number of records, the
    rate at which a batch has one of them, and its steps in a round. All have the same delta, so
    that the epsilon holds for each. Raises InputError where none has two records; or as
    `accounting.account` does."""
    largest = max(count for count, _, _ in clients)
    if config.delta is None and largest < 2:
        raise InputError(
            "privacy.level = 'record': delta is n^-1.1 of the n records of the client that has the "
            "most, and none has two; set privacy.delta, or raise split.min_examples"
        )
    delta = config.delta or largest**-_POWER

    def of(noise: float) -> Callable[[tuple[int, float, int]], RecordAccount]:
        return lambda one: RecordAccount(noise, delta, *one, rounds)

    if config.noise is not None:
        check_budget(
            config, lambda t: record_account(config.endless, clients, t).spent(t).epsilon, rounds
        )
        return _largest([*map(of(config.noise), clients)])
    assert config.epsilon is not None
    most, noise = min(clients), 0.0  # the fewest records, most often
    while True:
        noise = max(noise, _noise(of(1.0)(most), config.epsilon))
        found = _largest([*map(of(noise), clients)])
        if found.spent(rounds).epsilon <= config.epsilon:
            return found
        most = (found.records, found.rate, found.steps)


def _largest(accounts: Collection[RecordAccount]) -> RecordAccount:
    """The account with the largest epsilon."""
    bounds = {account: account.bound(account.rounds) for account in accounts}
    found, largest = None, -math.inf
    for account in sorted(bounds, key=bounds.__getitem__, reverse=True):
        if found is not None and bounds[account] <= largest:
            break
        if (epsilon := account.spent(account.rounds).epsilon) > largest:
            found, largest = account, epsilon
    assert found is not None
    return found


def _noise(account: RecordAccount, target: float) -> float:
    """The least noise with which an account spends no more than ``target``."""

    def spent(noise: float) -> float:
        return replace(account, noise=noise).spent(account.rounds).epsilon

    def bound(noise: float) -> float:
        return replace(account, noise=noise).bound(account.rounds)

    return least_noise(spent, target, least_noise(bound, target, 1.0))


@cache
def _bound(rate: float, noise: float, steps: int, delta: float) -> float:
    accountant = _package("rdp").RdpAccountant(_ORDERS)
    accountant.compose(_event(rate, noise), steps)
    return float(accountant.get_epsilon(delta))


@cache
def _epsilon(rate: float, noise: float, steps: int, delta: float, about: float) -> float:
    grid = min(0.05, math.sqrt(4 * _ERROR * about / steps))
    accountant = _package("pld").PLDAccountant(value_discretization_interval=grid)
    accountant.compose(_event(rate, noise), steps)
    return float(accountant.get_epsilon(delta))


def _event(rate: float, noise: float) -> Any:
    package = _package()
    return package.PoissonSampledDpEvent(rate, package.GaussianDpEvent(noise))
