"""Updates as whole numbers modulo 2^32, in such steps that a cohort's sum can't wrap round.

Client k of c has the weight p_k, of sum 1, and values u of at most R. It sends

    q_k = round(p_k u / s),  s = R / (2^31 - 1 - c)

so that |sum_k q_k| <= R / s + c / 2 < 2^31. Of those that are left the mean is s sum_k q_k divided
by the sum of their p_k; it is exact to half of c s over that sum.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError


class OutOfRangeError(InputError):
    """A value that does not fit."""


def step(largest: float, clients: int) -> float:
    """s, for values of at most ``largest`` of so many clients."""
    return largest / (2**31 - 1 - clients)


def encoded(
    values: NDArray[np.float64], weight: float, largest: float, clients: int
) -> NDArray[np.uint32]:
    """q_k modulo 2^32. Raises OutOfRangeError where a value is larger than ``largest``.

    >>> encoded(np.array([0.0, -1.0]), 1.0, 1.0, 1).tolist()
    [0, 2147483650]
    """
    most = float(np.abs(values).max(initial=0.0))
    if not most <= largest:
        raise OutOfRangeError(
            f"its update has values up to {2.0 ** np.ceil(np.log2(most)):g}; "
            f"secure_aggregation.range is {largest:g}"
        )
    whole = np.rint(values * (weight / step(largest, clients)))
    return whole.astype(np.int64).astype(np.uint32)


def decoded(
    total: NDArray[np.uint32], weight: float, largest: float, clients: int
) -> NDArray[np.float64]:
    """The mean, of a sum of clients whose weights have the sum ``weight``."""
    return total.view(np.int32).astype(np.float64) * (step(largest, clients) / weight)
