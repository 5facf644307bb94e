"""Updates as whole numbers modulo 2^32, in such steps that a cohort's sum can't wrap round.

Client k of c has the weight p_k, of sum 1, and values u of at most R. It sends

    q_k = p_k u / s, rounded towards 0,  s = R / (2^31 - 1 - c)

so that |sum_k q_k| <= R / s < 2^31, and no update gets longer. Of those that are left the mean is
s sum_k q_k divided by the sum of their p_k; it is exact to c s over that sum.

With noise of a standard deviation of N in the sum of updates where the fewest clients are left, m
of c, a client draws it by a discrete Gaussian, of the parameter

    p_k N / (s sqrt(m - 1)),  s = (R + 16 N / (m - 1)) / (2^31 - 1 - 33 c)

rounded up, and 1 more. So there is enough of it without the part that some client knows, its own.
Why it tells no more than Gaussian noise of the standard deviation N, which the account has, but for
a factor of 1 +- e^-100 in each probability:
- n discrete Gaussians of the parameter t have a sum that is one of t sqrt(n), to a factor of
  1 +- 10 n exp(-pi^2 t^2) in each probability of a value (Kairouz et al.). Here t is 100 or more.
- a discrete Gaussian of variance t^2 around any whole number is what Gaussian noise of variance
  t^2 - r^2 becomes that is rounded at random, to k with a probability in proportion to
  exp(-(k - x)^2 / (2 r^2)), to a factor of 1 +- 8 exp(-2 pi^2 r^2) (Peikert). For r = 4 the 1 more
  makes up for the variance.
Whoever sees sums modulo 2^32 knows less than who sees sums. They wrap round less often than once in
e^120 values, since a sum of discrete Gaussians is above 16 standard deviations no more often than a
Gaussian's bound exp(-16^2 / 2) says (Canonne et al.).

Sources:
- P. Kairouz, Z. Liu, T. Steinke. The Distributed Discrete Gaussian Mechanism for Federated Learning
  with Secure Aggregation. ICML 2021. There updates are rounded at random, and R and s are chosen
  for few bits.
- C. Peikert. An Efficient and Parallel Gaussian Sampler for Lattices. CRYPTO 2010.
- C. Canonne, G. Kamath, T. Steinke. The Discrete Gaussian for Differential Privacy. NeurIPS 2020.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from .discrete_gaussian import discrete_gaussian

LEAST_NOISE = 100  # steps in the standard deviation of a client's
_TAIL = 16  # standard deviations of noise for which there is room


class OutOfRangeError(InputError):
    """A value that does not fit. The message does not tell its size, which ``most`` is."""

    def __init__(self, message: str, most: float) -> None:
        super().__init__(message)
        self.most = most


@dataclass(frozen=True)
class FixedPoint:
    """Numbers for values of at most ``largest`` of so many ``clients``, whose sum, where ``least``
    are left, has ``noise``."""

    largest: float
    clients: int
    noise: float = 0.0
    least: int = 2

    @cached_property
    def step(self) -> float:
        """s."""
        if not self.noise:
            return self.largest / (2**31 - 1 - self.clients)
        room = _TAIL * self.noise / (self.least - 1)
        return (self.largest + room) / (2**31 - 1 - (2 * _TAIL + 1) * self.clients)

    def noise_steps(self, weight: float) -> float:
        """The standard deviation of a client's noise, in steps."""
        return weight * self.noise / (self.step * math.sqrt(self.least - 1))

    def encoded(
        self, values: NDArray[np.float64], weight: float, draws: np.random.Generator | None = None
    ) -> NDArray[np.uint32]:
        """q_k modulo 2^32, with noise from ``draws`` if there is to be some. Raises OutOfRangeError
        where a value is larger than ``largest``.

        >>> FixedPoint(1.0, 1).encoded(np.array([0.0, -1.0]), 1.0).tolist()
        [0, 2147483650]
        """
        most = float(np.abs(values).max(initial=0.0))
        if not most <= self.largest:
            raise OutOfRangeError(
                f"a value is beyond secure_aggregation.range = {self.largest:g}, and a larger "
                "range needs a new run",
                2.0 ** np.ceil(np.log2(most)),
            )
        whole = (values * (weight / self.step)).astype(np.int64)
        if not self.noise:
            return whole.astype(np.uint32)
        assert draws is not None
        std = math.ceil(self.noise_steps(weight)) + 1
        noised = whole + discrete_gaussian(draws, std, len(whole))
        return noised.astype(np.uint32)

    def decoded(self, total: NDArray[np.uint32], weight: float) -> NDArray[np.float64]:
        """The mean, of a sum of clients whose weights have the sum ``weight``."""
        return total.view(np.int32).astype(np.float64) * (self.step / weight)
