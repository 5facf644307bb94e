"""How much of a client's privacy a run spends: (epsilon, delta), by the package dp-accounting.

Neighbours are two federations of which one client has other data, or in which it changes nothing.
An update has a norm of at most C, so the sum of updates differs by at most s C, where s is 2 or 1;
the noise on it has the standard deviation sigma C.
- All K clients train in every round: T rounds together are one Gaussian mechanism whose noise is
  sigma / (s sqrt T) times the difference. Its epsilon is exact (Balle and Wang).
- Clients add the noise, so that the server may see sums, too: as if all trained in every round,
  since it knows who is drawn. So much noise is there if as few clients are left as may be, else
  more. `secure.fixed_point` says why it is as good in whole numbers.
- M of K clients are drawn without replacement: Renyi differential privacy of such samples (Wang,
  Balle and Kasiviswanathan), or the epsilon above, which is a bound here, where that is less.
- Each client is drawn with probability q = M / K by itself (Poisson): the privacy loss distribution
  (Koskela, Jalko and Honkela), as the package bounds it. A round of fewer than m clients, 1 or with
  secure aggregation 2, changes nothing, which shows. There a client tells at most q where m - 1
  others are drawn, so T rounds add at most T q Bin(m - 1; K - 1, q) to delta.
- A clip that follows a quantile of norms (Andrew et al.): beside its update a client sends 1/2 if
  its norm is within the clip, else -1/2. A client that is left out sends neither, which changes the
  sums by at most C and 1/2; other data change them by at most 2 C and 1. The ratio is the same, so
  for either kind of neighbours both together spend what updates alone do with the noise sigma, if
  1 / sigma^2 = 1 / sigma_u^2 + 1 / (2 sigma_b)^2, for the noise sigma_u C on the sum of updates and
  sigma_b on the other. With 0 instead of -1/2 the ratio would be another one: 1 in both cases.

Sources:
- B. Balle, Y.-X. Wang. Improving the Gaussian Mechanism for Differential Privacy. ICML 2018.
- Y.-X. Wang, B. Balle, S. P. Kasiviswanathan. Subsampled Renyi Differential Privacy and Analytical
  Moments Accountant. AISTATS 2019.
- A. Koskela, J. Jalko, A. Honkela. Computing Tight Differential Privacy Guarantees Using FFT.
  AISTATS 2020.
- clipped updates of clients, and noise on their mean: H. B. McMahan et al. Learning Differentially
  Private Recurrent Language Models. ICLR 2018.
- G. Andrew, O. Thakkar, H. B. McMahan, S. Ramaswamy. Differentially Private Learning with Adaptive
  Clipping. NeurIPS 2021.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from importlib import import_module
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Gt, Le, Lt

from ..errors import InputError
from ..units import counted

Neighbours = Literal["replace", "remove"]

_ORDERS = (*range(2, 25), 28, 32, 40, 48, 64, 100)  # of Renyi divergences
_PRECISION = 1e-4  # of the logarithm of a noise that is solved for
_GRID, _POINTS = 1e-3, 1e5  # of privacy losses; a coarser one where they are more than so many
_MOST_EMPTY = 0.5  # of delta, for rounds of nobody


@dataclass(frozen=True)
class PrivacyConfig:
    """Differential privacy of clients: the norm of each update is at most ``clip``, and the server
    adds noise of ``noise`` times ``clip`` as the standard deviation on the sum of updates. Or of
    records: that bounds the norm of each example's gradient, and clients add the noise in each
    step. Either it or ``epsilon``, over all rounds, is given; with both a run that would spend more
    is refused, or has fewer rounds."""

    level: Literal["client", "record"] = "client"

    epsilon: Annotated[float, Gt(0), Le(1000)] | None = None
    noise: Annotated[float, Ge(0.01), Le(1e6)] | None = None
    delta: Annotated[float, Gt(0), Lt(1)] | None = None  # None: n^-1.1 of n clients or records
    clip: Annotated[float, Gt(0), Le(1e12)] | None = None
    # the share of updates that are to be within it: it begins as ``clip``, and moves after a round
    clip_quantile: Annotated[float, Gt(0), Lt(1)] | None = None
    # of a cohort: so many clients, or each one by itself with the probability that gives so many
    sampling: Literal["fixed", "poisson"] = "fixed"
    # of two federations that must not be told apart: a client's data are others, or are not there
    neighbours: Neighbours = "replace"
    # noise and cohorts follow from a random number that the server keeps; else from the seed, which
    # may be guessed, and gives every run the same noise
    secret: bool = True
    # who adds noise to the sum of updates: the server, or under secure aggregation each client a
    # part, so that the server sees no sum without it
    noise_by: Literal["server", "clients"] = "server"
    # with noise and epsilon: train only as many of the rounds as spend no more
    stop: Literal["budget"] | None = None

    def __post_init__(self) -> None:
        if self.is_active and self.clip is None:
            whose = "an example's gradient" if self.of_records else "a client's update"
            raise InputError(f"privacy.clip is missing: the largest norm of {whose}")
        for name in ("sampling", "neighbours", "noise_by"):
            value = getattr(self, name)
            if self.of_records and value != getattr(type(self), name):
                raise InputError(
                    f"privacy.{name} = {value!r} is for privacy.level = 'client'; a record is "
                    "always drawn by itself, is there or not, and its client adds the noise"
                )
        if self.clip_quantile is not None and (self.of_records or self.by_clients):
            other = "level = 'record'" if self.of_records else "noise_by = 'clients'"
            raise InputError(
                f"privacy.clip_quantile = {self.clip_quantile:g} does not go with privacy.{other}: "
                "noise there is for a clip that stays the same; leave one of them out"
            )
        changed = [one.name for one in fields(self) if getattr(self, one.name) != one.default]
        if not self.is_active and changed:
            raise InputError("privacy has neither epsilon nor noise; give one of them")
        if self.stop is not None and (self.epsilon is None or self.noise is None):
            missing = "epsilon" if self.epsilon is None else "noise"
            raise InputError(
                f"privacy.stop = 'budget' needs privacy.{missing}, too: with one of the two alone "
                "a run has all its rounds"
            )

    @property
    def is_active(self) -> bool:
        """Whether there is noise."""
        return self.epsilon is not None or self.noise is not None

    @property
    def bound(self) -> float:
        """``clip``, where there is noise."""
        return self.clip or 0.0

    @property
    def endless(self) -> PrivacyConfig:
        """The same noise, whatever it spends; as it is where noise follows from epsilon."""
        return self if self.noise is None else replace(self, epsilon=None, stop=None)

    @property
    def is_poisson(self) -> bool:
        """Whether each client is drawn by itself."""
        return self.sampling == "poisson"

    @property
    def of_clients(self) -> bool:
        """Whether there is noise on the mean of updates."""
        return self.is_active and self.level == "client"

    @property
    def by_clients(self) -> bool:
        """Whether clients add it to their updates."""
        return self.of_clients and self.noise_by == "clients"

    @property
    def of_records(self) -> bool:
        """Whether there is noise in clients' steps."""
        return self.is_active and self.level == "record"


@dataclass(frozen=True)
class Spent:
    """What the rounds so far have spent: ``epsilon`` at ``delta``, with ``noise`` on the sum of
    updates as a multiple of the norm to which these are clipped."""

    epsilon: float
    delta: float
    noise: float
    accountant: str
    level: str = "client"


@dataclass(frozen=True)
class Account:
    """What a run spends that draws ``cohort`` of ``clients`` in each of ``rounds``; as many on
    average with ``poisson``, and a round of nobody changes nothing. Who is drawn may be ``known``:
    to the server, against which clients add the noise (``by_clients``), or to the others that mask
    with them."""

    noise: float
    delta: float
    clients: int
    cohort: int
    rounds: int
    poisson: bool = False
    neighbours: Neighbours = "replace"
    known: bool = False
    by_clients: bool = False

    @property
    def count_noise(self) -> float:
        """sigma_b: M / 20, as the paper recommends; no less than sigma where cohorts are small, so
        that updates get at most 16 % more noise."""
        return max(self.cohort / 20, self.noise)

    @property
    def update_noise(self) -> float:
        """sigma_u, beside bits with `count_noise`."""
        return float((self.noise**-2 - (2 * self.count_noise) ** -2) ** -0.5)

    @property
    def usual_delta(self) -> str:
        """How delta follows, if it isn't given."""
        return f"delta is {self.clients}^-1.1, by the number of clients"

    @cached_property
    def accountant(self) -> str:
        """What epsilon is worked out by."""
        if self.poisson:
            return "PLD, Poisson sampling"
        if self._gains and self._sampled(self.rounds) < self._exact(self.rounds):
            return "RDP, sampling without replacement"
        return "exact Gaussian"

    def epsilon(self, rounds: int) -> float:
        """What the first ``rounds`` spend."""
        of = {"P": self._poisson, "R": self._sampled, "e": self._exact}[self.accountant[0]]
        return of(rounds)

    def spent(self, rounds: int) -> Spent:
        """The same, with what it rests on."""
        return Spent(self.epsilon(rounds), self.delta, self.noise, self.accountant)

    def words(self, clip: float) -> str:
        """The whole run's budget in a line."""
        done = "replaced" if self.neighbours == "replace" else "left out"
        more = " or more, by the clients" if self.by_clients else ""
        return (
            f"epsilon {self.epsilon(self.rounds):.4g} at delta {self.delta:.3g} after "
            f"{counted(self.rounds, 'round')}, of a client whose data are {done} "
            f"({self.accountant}); updates of a norm up to {clip:g}, noise {self.noise:g}{more}"
        )

    @property
    def _gains(self) -> bool:
        """Whether epsilon may be less since cohorts of a fixed size are drawn."""
        drawn = self.cohort < self.clients and not self.known
        return drawn and self.neighbours == "replace"

    @property
    def _differ(self) -> int:
        """By how many times the clip the sums of two neighbours differ at most."""
        return 2 if self.neighbours == "replace" else 1

    @property
    def _empty(self) -> float:
        """The part of delta for rounds of nobody, which show."""
        from scipy.stats import binom  # it takes a second, which few need

        q = self.cohort / self.clients
        others = binom.pmf(0, self.clients - 1, q)
        return float(self.rounds * q * others) if self.poisson else 0.0

    def check(self) -> None:
        """Raise InputError where rounds of nobody would tell too much."""
        if self._empty > _MOST_EMPTY * self.delta:
            raise InputError(
                f"privacy.sampling = 'poisson': a cohort of {self.cohort} of {self.clients} "
                "clients is empty so often that this alone spends more than half of delta = "
                f"{self.delta:.3g}; draw more clients, or set privacy.sampling = 'fixed'"
            )

    def _exact(self, rounds: int) -> float:
        sigma = self.noise / (self._differ * math.sqrt(rounds))
        return float(_package().get_epsilon_gaussian(sigma, self.delta))

    def _sampled(self, rounds: int) -> float:
        curve = [rounds * one for one in _renyi(self.clients, self.cohort, self.noise)]
        epsilon, _ = _package("rdp").compute_epsilon(_ORDERS, curve, self.delta)
        return float(epsilon)

    def _poisson(self, rounds: int) -> float:
        losses = _losses(self.cohort / self.clients, self.noise, self.neighbours)
        delta = self.delta - self._empty
        with np.errstate(over="ignore"):  # of a large epsilon
            return float(losses.self_compose(rounds).get_epsilon_for_delta(delta))


@cache
def account(
    config: PrivacyConfig, clients: int, cohort: int, rounds: int, masked: bool = False
) -> Account:
    """The account of ``rounds`` with ``cohort`` of ``clients`` each; the noise is the least one, to
    four digits, where epsilon alone is given. Who is ``masked`` learns who is drawn. Raises
    InputError where there is one client alone, or all are said to be drawn; where epsilon and noise
    are given, and the rounds spend more; or where the package dp-accounting is missing."""
    delta = clients**-1.1 if config.delta is None else config.delta
    if delta >= 1:
        raise InputError("privacy needs two clients or more; 1 takes part")
    if config.is_poisson and cohort == clients:
        raise InputError(
            "privacy.sampling = 'poisson', but cohort.fraction = 1 draws all clients; draw fewer, "
            "or leave sampling out"
        )
    if config.is_poisson and masked:
        raise InputError(
            "privacy.sampling = 'poisson' does not go with [secure_aggregation]: those who mask "
            "together know who is drawn, so chance hides nobody from them; leave one of them out"
        )
    target, known = config.epsilon, masked or config.by_clients

    def of(noise: float) -> Account:
        how = config.is_poisson, config.neighbours, known, config.by_clients
        return Account(noise, delta, clients, cohort, rounds, *how)

    of(1.0).check()
    if config.noise is not None:
        check_budget(
            config, lambda t: account(config.endless, clients, cohort, t, masked).epsilon(t), rounds
        )
        return of(config.noise)
    assert target is not None
    exact = of(1.0)._differ * math.sqrt(rounds) * _package().get_sigma_gaussian(target, delta)
    if cohort == clients or not (config.is_poisson or of(1.0)._gains):
        return of(_up(exact))
    return of(least_noise(lambda noise: of(noise).epsilon(rounds), target, exact))


def check_budget(config: PrivacyConfig, epsilons: Callable[[int], float], rounds: int) -> None:
    """Raise InputError where so many rounds spend more than ``config.epsilon``; ``epsilons`` says
    what a run of any number does."""
    target = config.epsilon
    if target is None or epsilons(rounds) <= target:
        return
    fit = rounds_within(target, epsilons, rounds)
    way_out = f"rounds up to {fit} (or privacy.stop = 'budget'), or " if fit else ""
    raise InputError(
        f"privacy.noise = {config.noise:g} spends epsilon {epsilons(rounds):.4g} in "
        f"{counted(rounds, 'round')}, and privacy.epsilon = {target:g}; allowed: {way_out}more "
        "noise"
    )


def rounds_within(epsilon: float, epsilons: Callable[[int], float], rounds: int) -> int:
    """How many of the ``rounds`` spend no more than ``epsilon``; ``epsilons`` says what a run of
    any number does."""
    return bisect_right(range(1, rounds + 1), epsilon, key=epsilons)


def least_noise(epsilon_of: Callable[[float], float], target: float, start: float) -> float:
    """The least noise, to four digits, that spends no more than ``target``; near ``start``."""
    from scipy.optimize import brentq

    def excess(log_noise: float) -> float:
        return epsilon_of(math.exp(log_noise)) - target

    most = math.log(start)
    while excess(most) > 0:
        most += 0.1
    low = most - 0.3
    while excess(low) <= 0:
        low -= 0.3
    found = brentq(excess, low, most + _PRECISION, xtol=_PRECISION) + _PRECISION
    return _up(math.exp(min(most, found)))


@cache
def _renyi(clients: int, cohort: int, noise: float) -> tuple[float, ...]:
    """The Renyi divergences of one round, by order."""
    package, relation = _package(), _package().NeighboringRelation.REPLACE_ONE
    accountant = _package("rdp").RdpAccountant(_ORDERS, relation)
    gaussian = package.GaussianDpEvent(noise / 2)
    accountant.compose(package.SampledWithoutReplacementDpEvent(clients, cohort, gaussian))
    return tuple(accountant._rdp.tolist())  # so that a round more is a sum, not a new curve


@cache
def _losses(q: float, noise: float, neighbours: Neighbours) -> Any:
    """The privacy loss distribution of one round."""
    relations = _package().NeighboringRelation
    relation = relations.REPLACE_ONE if neighbours == "replace" else relations.REPLACE_SPECIAL
    return _package("pld.privacy_loss_distribution").from_gaussian_mechanism(
        noise,
        sampling_prob=q,
        value_discretization_interval=max(_GRID, (2 / noise) ** 2 / _POINTS),
        neighboring_relation=relation,
    )


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
