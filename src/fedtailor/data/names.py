"""Names of clients and classes: what may stand in them, a client's number."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable, Sequence
from operator import index

from ..errors import FEW, InputError, brief, listed, printed, spelt, whole_number

LONGEST = 500  # characters of a name
_JOINERS = "\u200c\u200d"  # of Persian and Indian words, and of emoji


def client_number(
    client: str | int, count: int, names: Sequence[str] | None, joined: Sequence[str] = ()
) -> int:
    """Return the number of one of ``count`` clients, from its name or its number; InputError where
    there is none. ``joined`` are names of further clients, for messages.

    An ``int`` is always a number. Text is a name. It may also be a number, unless a client's name
    is a whole number itself: among the hospitals "3" and "7", "1" is nobody.

    >>> client_number("rome", 2, ["oslo", "rome"]), client_number("1", 2, ["oslo", "rome"])
    (1, 1)
    >>> client_number("7", 2, ["3", "7"]), client_number(1, 2, ["3", "7"])
    (1, 1)
    """
    if isinstance(client, str) and names is not None:
        if client and client in names:
            return names.index(client)
        if not client.isdecimal() or any(name.isdecimal() for name in names):
            raise InputError(_unknown(client, [*names, *joined]))
    number = whole_number(client) if isinstance(client, str) else None
    if hasattr(client, "__index__") and not isinstance(client, bool):  # no 1.5, which is nobody
        number = index(client)
    if number is None or not 0 <= number < count:
        others = f", or by name: {listed(joined)}" if joined else ""
        shown = client if len(str(client)) <= 120 else brief(client)
        raise InputError(f"no client {shown}; allowed: 0 to {count - 1}{others}")
    return number


def check_names(kind: str, names: Iterable[object], where: str = "") -> None:
    """Raise InputError at a name that is too long, or has a character that can't be shown, such as
    a line's end, and at two names that print alike. Messages say what ``kind`` of thing has the
    names, and ``where``.

    >>> check_names("client", ["Zürich 2", "ward_7", "می\u200cخواهم"])
    """
    place = f" in {where}" if where else ""
    texts = [str(name) for name in names]
    for name in texts:
        if len(name) > LONGEST:
            raise InputError(
                f"{kind} {brief(name)}{place} has a name of {len(name):,} characters; at most "
                f"{LONGEST} are allowed"
            )
        for character in "" if name.isprintable() else name:
            is_space = unicodedata.category(character) == "Zs"
            if not (character.isprintable() or is_space or character in _JOINERS):
                raise InputError(
                    f"{kind} {brief(name)}{place}: {character!a} can't be shown; allowed are "
                    "letters, digits, punctuation, symbols and spaces"
                )
    if all(name.isascii() and name == name.strip() for name in texts):
        return
    seen: dict[str, str] = {}
    for name in texts:
        other = seen.setdefault(printed(name), name)
        if other != name and name.strip():
            raise InputError(
                f"{kind} {name!a}{place} prints like {other!a}; write the two alike, or tell them "
                "apart"
            )


def _unknown(client: str, names: Sequence[str]) -> str:
    known = [name for name in names if name]  # a site knows the names of its own clients alone
    shown = spelt(client, known)
    if len(known) > FEW:
        return f"no client {shown}; {len(known):,} clients have names: {listed(known[:3])}, ..."
    similar = difflib.get_close_matches(client, known, n=1)
    hint = f"did you mean {similar[0]!r}? " if similar and shown == brief(client) else ""
    return f"no client {shown}; {hint}allowed: {', '.join(known)}"
