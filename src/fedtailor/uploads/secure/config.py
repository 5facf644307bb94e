"""Settings of secure aggregation, and what follows from them: neighbours and thresholds."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import cache
from typing import Annotated

from annotated_types import Ge, Gt, Le

from ...errors import InputError

_SAFE = 2.0**-40  # the probability, over a cohort, that masks give way or can't be taken off


@dataclass(frozen=True)
class SecureAggregationConfig:
    """The server sees sums alone: active with a ``threshold``, the share of a cohort that must
    stay. A client whose update has a value beyond ``range`` sends nothing."""

    threshold: Annotated[float, Gt(0.5), Le(1)] | None = None
    range: Annotated[float, Gt(0), Le(1e12)] = 8.0
    # of each client; None: as many as are safe, all in cohorts of a few hundred
    neighbours: Annotated[int, Ge(2), Le(100_000)] | None = None

    def __post_init__(self) -> None:
        usual = SecureAggregationConfig
        if self.threshold is None and (self.range, self.neighbours) != (usual.range, None):
            raise InputError(
                "secure_aggregation has no threshold, so nothing is masked; set the share of a "
                "cohort that must stay, such as 0.7"
            )

    @property
    def is_active(self) -> bool:
        """Whether uploads are masked."""
        return self.threshold is not None

    def words(self, clients: int) -> str:
        """What is hidden in rounds of so many ``clients``; empty where nothing is."""
        if not self.is_active:
            return ""
        least = self.least(clients)
        return f"the server sees sums of updates alone; {least} of {clients} clients must stay"

    def least(self, clients: int) -> int:
        """How many of ``clients`` must stay; more than half, and two."""
        assert self.threshold is not None
        return max(2, clients // 2 + 1, math.ceil(self.threshold * clients - 1e-9))

    def check_neighbours(self, clients: int) -> None:
        """Raise InputError where they are so few that a cohort of ``clients`` may fall into parts,
        whose sums the server would see."""
        least = degree(clients, self.least(clients))
        if self.neighbours is not None and self.degree(clients) < least:
            raise InputError(
                f"secure_aggregation.neighbours = {self.neighbours}: so few don't hide the updates "
                f"of {clients} clients; allowed: {least} or more, or leave it out"
            )

    def degree(self, clients: int) -> int:
        """How many neighbours each of ``clients`` has: all others, or an even number of them."""
        wanted = self.neighbours or degree(clients, self.least(clients))
        return clients - 1 if wanted >= clients - 2 else wanted + wanted % 2

    def needed(self, clients: int) -> int:
        """How many of the shares of a client and its neighbours rebuild a secret of it."""
        known = self.degree(clients) + 1
        if known == clients:
            return self.least(clients)
        return _needed(known, self.least(clients) / clients)


def _needed(known: int, stay: float) -> int:
    """Half-way between a third of the share that stays, who may collude, and all of that share."""
    return max(2, math.ceil(known * stay * 2 / 3))


@cache
def degree(clients: int, least: int) -> int:
    """The least even number of neighbours that is safe, or all others.

    But for a probability of 2^-40 over the cohort, two thirds of the neighbours that stay on
    average are there when ``least`` clients stay, and fewer than that collude when a third of
    ``least`` do (after the analysis of Bell et al. 2020).

    >>> degree(100, 70), degree(10_000, 7_000)
    (58, 284)
    """
    halves = range(1, clients // 2)  # the probability falls with the number of neighbours
    fewest = 1 + bisect_left(
        halves, True, key=lambda half: _fails(clients, least, 2 * half) * clients <= _SAFE
    )
    return min(2 * fewest, clients - 1)


def _fails(clients: int, least: int, neighbours: int) -> float:
    """The probability that a client's shares are too few, or too many are known to others."""
    from scipy.stats import hypergeom  # it takes a second, which few need

    needed = _needed(neighbours + 1, least / clients)
    few = hypergeom.sf(neighbours - needed, clients, clients - least, neighbours)
    return float(few + hypergeom.sf(needed - 1, clients, least // 3, neighbours))
