"""What an attack has found out: a number, its interval, and what chance would give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .. import random

Floats = NDArray[np.float64]

_RESAMPLES = 300


@dataclass(frozen=True)
class Finding:
    """What ``attack`` has found out from ``target``. ``value`` of the ``measure`` lies between
    ``low`` and ``high`` with 95 % confidence, ``chance`` is what whoever knows nothing reaches, and
    ``says`` is all that in a sentence. Without a value the attack was not tried, for that reason.
    """

    attack: str
    target: str
    measure: str
    says: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    chance: float | None = None

    @classmethod
    def none(cls, attack: str, target: str, measure: str, why: str) -> list[Finding]:
        """Of an attack that was not tried."""
        return [cls(attack, target, measure, f"not tried: {why}")]

    def cells(self) -> tuple[str, ...]:
        """The finding as a row of `HEADER`."""
        end = "or more" if self.high is None else f"to {_text(self.high)}"
        interval = "" if self.low is None else f"{_text(self.low)} {end}"
        numbers = _text(self.value), interval, _text(self.chance)
        return self.attack, self.target, self.measure, *numbers, self.says


HEADER = ("attack", "on", "measure", "value", "95 %", "chance", "")


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def interval(
    measure: Callable[..., float], samples: Sequence[Floats], *parts: int | str
) -> tuple[float, float]:
    """The 95 % interval of a measure by the bootstrap: each of the ``samples`` is drawn anew with
    replacement, by a key of these ``parts``. What was drawn is taken as independent; models are
    fixed."""
    draws = random.generator("bootstrap", *parts)
    found = [
        measure(*(one[draws.integers(len(one), size=len(one))] for one in samples))
        for _ in range(_RESAMPLES)
    ]
    low, high = np.quantile(found, [0.025, 0.975])
    return float(low), float(high)
