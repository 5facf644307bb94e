"""Whole numbers by a discrete Gaussian: k with a probability in proportion to exp(-k^2 / (2 s^2)).

C. Canonne, G. Kamath, T. Steinke. The Discrete Gaussian for Differential Privacy. NeurIPS 2020.

Only whole numbers are drawn and compared, so that no rounding changes a probability.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Whole = NDArray[np.int64]

_MOST = 1 << 20  # that are drawn at a time
_FAR = 40  # standard deviations: farther ones are kept less often than once in e^700 draws


def discrete_gaussian(rng: np.random.Generator, std: int, count: int) -> Whole:
    """Draw ``count`` numbers of a parameter s of ``std``, below 2^26.

    >>> draws = discrete_gaussian(np.random.default_rng(0), 1000, 10_000)
    >>> 985 < draws.std() < 1015
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
    times = _in_a_row(rng, np.full(len(size), _FAR))
    size += std * times
    sign = 1 - 2 * rng.integers(0, 2, len(size))
    draws = (size * sign)[(size > 0) | (sign > 0)]  # 0 counts once
    below = 2 * std * std
    whole, part = np.divmod((np.abs(draws) - std) ** 2, below)
    kept: Whole = draws[_happens(rng, part, below) & (_in_a_row(rng, whole) == whole)]
    return kept


def _happens(rng: np.random.Generator, above: Whole, below: int) -> NDArray[np.bool_]:
    """True with the probability exp(-above / below), of fractions up to 1."""
    odd, going, k = np.ones(len(above), np.bool_), np.arange(len(above)), 1
    while len(going):
        going = going[rng.integers(0, k * below, len(going)) < above[going]]
        odd[going] ^= True
        k += 1
    return odd


def _in_a_row(rng: np.random.Generator, most: Whole) -> Whole:
    """How often in a row what has the probability 1 / e happens, up to ``most`` times."""
    times, going = np.zeros_like(most), most.nonzero()[0]
    while len(going):
        going = going[_happens(rng, np.ones_like(going), 1)]
        times[going] += 1
        going = going[times[going] < most[going]]
    return times
