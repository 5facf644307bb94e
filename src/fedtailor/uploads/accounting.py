"""How much of a client's privacy a run spends: (epsilon, delta), by the package dp-accounting.

Neighbours are two federations of which one client has other data. Each of M updates has a norm of
at most C, so their sum differs by at most 2 C; the noise on it has the standard deviation sigma C.
- All K clients train in every round: T rounds together are one Gaussian mechanism whose noise is
  sigma / (2 sqrt T) times the difference. Its epsilon is exact (Balle and Wang).
- M of K clients are drawn without replacement: Renyi differential privacy of such samples (Wang,
  Balle and Kasiviswanathan), or the epsilon above, which is a bound here, where that is less.

Sources:
- B. Balle, Y.-X. Wang. Improving the Gaussian Mechanism for Differential Privacy. ICML 2018.
- Y.-X. Wang, B. Balle, S. P. Kasiviswanathan. Subsampled Renyi Differential Privacy and Analytical
  Moments Accountant. AISTATS 2019.
- clipped updates of clients, and noise on their mean: H. B. McMahan et al. Learning Differentially
  Private Recurrent Language Models. ICLR 2018.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt
from scipy.optimize import brentq

from ..errors import InputError

_ORDERS = (*range(2, 25), 28, 32, 40, 48, 64, 100)  # of Renyi divergences
_PRECISION = 1e-4  # of the logarithm of a noise that is solved for


@dataclass(frozen=True)
class PrivacyConfig:
    """Differential privacy of clients: the norm of each update is at most ``clip``, and the server
    adds noise. Either ``epsilon``, over all rounds, is given, or ``noise``, the standard deviation
    on the sum of updates as a multiple of ``clip``."""

    epsilon: Annotated[float, Gt(0), Le(1000)] | None = None
    noise: Annotated[float, Ge(0.01), Le(1e6)] | None = None
    delta: Annotated[float, Gt(0), Lt(1)] | None = None  # None: K^-1.1 of K clients
    clip: Annotated[float, Gt(0), Le(1e12)] | None = None

    def __post_init__(self) -> None:
        if self.epsilon is not None and self.noise is not None:
            raise InputError(
                f"privacy.epsilon = {self.epsilon} and privacy.noise = {self.noise}: give one of "
                "them; the other one follows"
            )
        if self.is_active and self.clip is None:
            raise InputError("privacy.clip is missing: the largest norm of a client's update")
        if not self.is_active and (self.delta, self.clip) != (None, None):
            raise InputError("privacy has neither epsilon nor noise; give one of them")

    @property
    def is_active(self) -> bool:
        """Whether there is noise."""
        return self.epsilon is not None or self.noise is not None


@dataclass(frozen=True)
class Spent:
    """What the rounds so far have spent: ``epsilon`` at ``delta``, with ``noise`` on the sum of
    updates as a multiple of the norm to which these are clipped."""

    epsilon: float
    delta: float
    noise: float
    accountant: str


@dataclass(frozen=True)
class Account:
    """What a run spends that draws ``cohort`` of ``clients`` in each of ``rounds``."""

    noise: float
    delta: float
    clients: int
    cohort: int
    rounds: int

    @cached_property
    def is_sampled(self) -> bool:
        """Whether less is spent because a round has a part of the clients alone."""
        if self.cohort == self.clients:
            return False
        return self._sampled(self.rounds) < self._exact(self.rounds)

    @property
    def accountant(self) -> str:
        """What epsilon is worked out by."""
        return "RDP, sampling without replacement" if self.is_sampled else "exact Gaussian"

    def spent(self, rounds: int) -> Spent:
        """What the first ``rounds`` spend."""
        epsilon = self._sampled(rounds) if self.is_sampled else self._exact(rounds)
        return Spent(epsilon, self.delta, self.noise, self.accountant)

    def words(self, clip: float) -> str:
        """The whole run's budget in a line."""
        return (
            f"epsilon {self.spent(self.rounds).epsilon:.4g} at delta {self.delta:.3g} after "
            f"{self.rounds} rounds, of a client whose data are replaced ({self.accountant}); "
            f"updates of a norm up to {clip:g}, noise {self.noise:g}"
        )

    def _exact(self, rounds: int) -> float:
        sigma = self.noise / (2 * math.sqrt(rounds))
        return float(_package().get_epsilon_gaussian(sigma, self.delta))

    def _sampled(self, rounds: int) -> float:
        curve = [rounds * one for one in _renyi(self.clients, self.cohort, self.noise)]
        epsilon, _ = _package("rdp").compute_epsilon(_ORDERS, curve, self.delta)
        return float(epsilon)


@cache
def account(config: PrivacyConfig, clients: int, cohort: int, rounds: int) -> Account:
    """The account of a run; the noise is the least one, to four digits, where epsilon is given.

    Args:
        config: active settings.
        clients: K, those that may be drawn.
        cohort: M, how many of them train in each round.
        rounds: T.

    Raises:
        InputError: there is one client alone, or the package dp-accounting is missing.
    """
    delta = clients**-1.1 if config.delta is None else config.delta
    if delta >= 1:
        raise InputError("privacy needs two clients or more; 1 takes part")
    if config.noise is not None:
        return Account(config.noise, delta, clients, cohort, rounds)
    target = config.epsilon
    assert target is not None

    def of(log_noise: float) -> Account:
        return Account(math.exp(log_noise), delta, clients, cohort, rounds)

    def excess(log_noise: float) -> float:
        return of(log_noise).spent(rounds).epsilon - target

    most = math.log(2 * math.sqrt(rounds) * _package().get_sigma_gaussian(target, delta))
    if cohort < clients:
        least = most - 1
        while excess(least) <= 0:
            least -= 1
        most = min(most, brentq(excess, least, most + _PRECISION, xtol=_PRECISION) + _PRECISION)
    return Account(_up(math.exp(most)), delta, clients, cohort, rounds)


@cache
def _renyi(clients: int, cohort: int, noise: float) -> tuple[float, ...]:
    """The Renyi divergences of one round, by order."""
    package, relation = _package(), _package().NeighboringRelation.REPLACE_ONE
    accountant = _package("rdp").RdpAccountant(_ORDERS, relation)
    gaussian = package.GaussianDpEvent(noise / 2)
    accountant.compose(package.SampledWithoutReplacementDpEvent(clients, cohort, gaussian))
    return tuple(accountant._rdp.tolist())  # so that a round more is a sum, not a new curve


def _up(value: float) -> float:
    """``value`` to four digits, rounded up.

    >>> _up(1.23412), _up(20.0)
    (1.235, 20.0)
    """
    unit = 10.0 ** (math.floor(math.log10(value)) - 3)
    return float(f"{math.ceil(value / unit - 1e-6) * unit:.4g}")


def _package(part: str = "") -> Any:
    try:
        return import_module(f"dp_accounting.{part}".rstrip("."))
    except ModuleNotFoundError:
        raise InputError(
            "[privacy] needs dp-accounting: pip install 'fedtailor[privacy]'"
        ) from None
