"""Differences in words, in the unit of a metric."""

from __future__ import annotations

from ..store.metrics import Metric, is_percentage


def scale_of(metric: Metric) -> tuple[float, int]:
    """The factor on a metric's values, and how many digits are shown."""
    return (100, 1) if is_percentage(metric) else (1, 3)


def bare(metric: Metric, value: float | None, *, signed: bool = False) -> str:
    """Format a result or a difference without its unit; ``-`` for none.

    >>> bare("accuracy", 0.0321), bare("accuracy", 0.0321, signed=True), bare("loss", None)
    ('3.2', '+3.2', '-')
    """
    if value is None:
        return "-"
    factor, digits = scale_of(metric)
    number = round(factor * value, digits) + 0.0  # no negative zero
    return f"{number:{'+' if signed else ''}.{digits}f}"
