"""The one exception for bad input: a message that says what is wrong and what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Input that can't be used. The message is one line; the command line exits with code 2."""


class DivergedError(InputError):
    """Training that has left the finite numbers: with these settings, not with every setting."""


def unknown(
    what: str, name: str, allowed: Iterable[str], *, where: str = "", kind: str = "allowed"
) -> InputError:
    """The error for a name (in ``where``) that is not one of ``allowed``, with the nearest ones.

    >>> print(unknown("method", "fedsgd", ["fedavg", "fedsdg"]))
    unknown method 'fedsgd'; did you mean 'fedsdg' or 'fedavg'? allowed: fedavg, fedsdg
    """
    names = sorted(allowed)
    near = difflib.get_close_matches(name, names, n=2)
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ";"
    place = f" in {where}" if where else ""
    return InputError(f"unknown {what} {name!r}{place}{hint} {kind}: {', '.join(names)}")
