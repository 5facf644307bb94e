"""Shamir's secret sharing over the integers modulo 2^255 - 19.

Source: A. Shamir. How to Share a Secret. Communications of the ACM 1979.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from secrets import randbelow

PRIME = 2**255 - 19


def split(secret: int, needed: int, holders: Iterable[int]) -> dict[int, int]:
    """A share for each of ``holders`` (numbers from 0), of which ``needed`` give the secret, a
    number below 2^248, and fewer tell nothing of it."""
    terms = [*(randbelow(PRIME) for _ in range(needed - 1)), secret]  # the highest power first
    shares = {}
    for holder in holders:
        value = 0
        for term in terms:
            value = (value * (holder + 1) + term) % PRIME
        shares[holder] = value
    return shares


def join(shares: Mapping[int, int]) -> int:
    """The secret, of exactly as many shares as are needed, by holder.

    >>> shares = split(42, 2, range(3))
    >>> join({0: shares[0], 2: shares[2]})
    42
    """
    factors = _factors(tuple(shares))
    return sum(f * share for f, share in zip(factors, shares.values(), strict=True)) % PRIME


@lru_cache(8)  # in a complete graph all secrets have the same holders
def _factors(holders: tuple[int, ...]) -> list[int]:
    """Lagrange's polynomials at 0."""
    factors = []
    for one in holders:
        above = below = 1
        for other in holders:
            if other != one:
                above = above * (other + 1) % PRIME
                below = below * (other - one) % PRIME
        factors.append(above * pow(below, -1, PRIME) % PRIME)
    return factors
