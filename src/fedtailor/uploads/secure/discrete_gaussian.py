"""Whole numbers by a discrete Gaussian: k with a probability in proportion to exp(-k^2 / (2 s^2)).

C. Canonne, G. Kamath, T. Steinke. The Discrete Gaussian for Differential Privacy. NeurIPS 2020.

Differs from the paper: events are drawn by comparing a random number with their probability, which
float64 mostly can; else 50 digits do. So no probability is wrong by more than 2^-100.
"""

from __future__ import annotations

from decimal import Decimal, localcontext

import numpy as np
from numpy.typing import NDArray

Whole = NDArray[np.int64]

_MOST = 1 << 20  # that are drawn at a time
_FAR = 40  # standard deviations: farther ones are kept less often than once in e^700 draws
_CLOSE = 1e-12  # no error of a probability in float64 is larger


def discrete_gaussian(rng: np.random.Generator, std: int, count: int) -> Whole:
    """Draw ``count`` numbers of a parameter s of ``std``, below 2^26.

    >>> draws = discrete_gaussian(np.random.default_rng(0), 1000, 10_000)
    >>> bool(985 < draws.std() < 1015)
    True
    """
    parts, left = list[Whole](), count
    while left:
        draws = _draws(rng, std, min(3 * left + 16, _MOST))[:left]
        parts.append(draws)
        left -= len(draws)
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _draws(rng: np.random.Generator, std: int, count: int) -> Whole:
    """About 0.47 times ``count`` numbers: a discrete Laplace distribution's, of which each is kept
    with the probability exp(-(|k| - s)^2 / (2 s^2))."""
    size = rng.integers(0, std, count)
    size = size[_happens(rng, size, std)]
    going = np.arange(len(size))
    for _ in range(_FAR):
        going = going[_happens(rng, np.ones_like(going), 1)]
        size[going] += std
    sign = 1 - 2 * rng.integers(0, 2, len(size))
    draws: Whole = (size * sign)[(size > 0) | (sign > 0)]  # 0 counts once
    return draws[_happens(rng, (np.abs(draws) - std) ** 2, 2 * std * std)]


def _happens(rng: np.random.Generator, above: Whole, below: int) -> NDArray[np.bool_]:
    """True with the probability exp(-above / below)."""
    odds, draws = np.exp(-above / below), rng.random(len(above))  # in steps of 2^-53
    happens: NDArray[np.bool_] = draws < odds
    with localcontext(prec=50):
        for at in (np.abs(draws - odds) < _CLOSE).nonzero()[0]:
            between = Decimal(int(rng.integers(2**62))) / 2**115
            happens[at] = Decimal(draws[at]) + between < (-Decimal(int(above[at])) / below).exp()
    return happens
