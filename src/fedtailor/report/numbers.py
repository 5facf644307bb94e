"""Numbers in words: with prefixes of the SI, and in the unit of a metric."""

from __future__ import annotations

from .select import Metric, is_percentage


def si(value: float | None, unit: str = "") -> str:
    """Format ``value`` with three digits and a prefix of the SI.

    >>> si(147_456), si(1_250_000, "B"), si(12), si(None)
    ('147k', '1.25 MB', '12', '-')
    """
    if value is None:
        return "-"
    power = 0
    while abs(value) >= 999.5 and power < 4:
        value, power = value / 1000, power + 1
    return f"{value:.3g}{' ' if unit else ''}{('', 'k', 'M', 'G', 'T')[power]}{unit}"


def seconds_text(value: float) -> str:
    """Format seconds.

    >>> seconds_text(3.21), seconds_text(102.7)
    ('3.2', '103')
    """
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def scale_of(metric: Metric) -> tuple[float, int]:
    """The factor on a metric's values, and how many digits are shown."""
    return (100, 1) if is_percentage(metric) else (1, 3)


def bare(metric: Metric, value: float, *, signed: bool = False) -> str:
    """Format a difference without its unit.

    >>> bare("accuracy", 0.0321), bare("accuracy", 0.0321, signed=True), bare("loss", -0.25)
    ('3.2', '+3.2', '-0.250')
    """
    factor, digits = scale_of(metric)
    number = round(factor * value, digits) + 0.0  # no negative zero
    return f"{number:{'+' if signed else ''}.{digits}f}"


def amount(metric: Metric, value: float, *, signed: bool = False) -> str:
    """Format a difference with its unit.

    >>> amount("accuracy", 0.0321), amount("loss", 0.25)
    ('3.2 points', '0.250 nats per token')
    """
    unit = " points" if is_percentage(metric) else " nats per token" if metric == "loss" else ""
    return bare(metric, value, signed=signed) + unit
