"""Numbers in words: with prefixes of the SI, and in units of time."""

from __future__ import annotations


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


def fixed(value: float, digits: int) -> str:
    """Format a number with so many digits behind its point; a huge one shortly.

    >>> fixed(1234.5678, 1), fixed(-2e-9, 3), fixed(3.2e120, 3)
    ('1234.6', '0.000', '3.2e+120')
    """
    return f"{value:.3g}" if abs(value) >= 1e9 else f"{round(value, digits) + 0.0:.{digits}f}"


def counted(number: int, noun: str) -> str:
    """Name so many things.

    >>> counted(1, "round"), counted(12_000, "round")
    ('1 round', '12,000 rounds')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def seconds_text(value: float) -> str:
    """Format seconds.

    >>> seconds_text(3.21), seconds_text(102.7)
    ('3.2', '103')
    """
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def in_words(seconds: float) -> str:
    """Return a time in the units that a reader would use.

    >>> [in_words(seconds) for seconds in (0.2, 42, 200, 8000, 200_000)]
    ['1 s', '42 s', '3 min', '2 h 13 min', '2 d 7 h']
    """
    if seconds < 120:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
