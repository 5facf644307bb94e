"""Messages for users, and the one exception for bad input: what is wrong, and what is allowed."""

from __future__ import annotations

import difflib
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FEW = 20  # names in one message
GO_ON = "the same command goes on after the last committed round"
_UNSEEN = "\u034f\u200b\u200c\u200d\u2060\ufe0e\ufe0f\ufeff"  # joiners, and what chooses a glyph


class InputError(ValueError):
    """Input that can't be used. The message is one line; the command line exits with code 2."""


class TooFewUploadsError(InputError):
    """A robust rule can't show which of so few uploads are false."""


class NoiseSpentError(TooFewUploadsError):
    """Too few clients have an update with noise left in their account."""


class DivergedError(InputError):
    """Training whose loss or state is no longer finite. Other settings may still work."""


class TooFewLeftError(DivergedError):
    """The bound on the norms of uploads leaves too few of a round's clients."""


def say(text: object) -> None:
    """Print a line on stderr, at once."""
    print(text, file=sys.stderr, flush=True)


def announce(text: object) -> None:
    """Print a line of fedtailor's on stderr, at once."""
    say(f"fedtailor: {text}")


def one_line(text: object) -> str:
    """Return a text fit for a terminal's line: what is not printable becomes a space or ``?``.

    >>> one_line("no\\x1b[2J\\ndata")
    'no?[2J data'
    """
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in str(text))


def brief(value: Any, most: int = 120) -> str:
    """Return a value as a message quotes it: one line of at most ``most`` characters.

    >>> brief("xpu"), brief([1, 2, 3], 6), brief(1 << 99999)
    ("'xpu'", '[1,...', 'a number of 100000 bits')
    """
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of more than 4,300 digits
        bits = f" of {value.bit_length()} bits" if isinstance(value, int) else ""
        return f"a number{bits}" if bits else "a value with a very large number"
    text = one_line(text) if "\n" in text else text
    return text if len(text) <= most else text[: most - 3] + "..."


def whole_number(text: str) -> int | None:
    """Return the whole number that a text has in digits; None if it has none, or one too large.

    >>> whole_number("12"), whole_number("-1"), whole_number("²"), whole_number(5000 * "9")
    (12, None, None, None)
    """
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def unknown(
    what: str, name: str, allowed: Iterable[str], *, where: str = "", kind: str = "allowed"
) -> InputError:
    """Return the error for the name of a ``what``, such as "method", that is none of ``allowed``;
    the message has the nearest ones, ``where`` the name stands, and ``kind`` before those allowed.

    >>> print(unknown("method", "fedsgd", ["fedavg", "fedsdg"]))
    unknown method 'fedsgd'; did you mean 'fedsdg' or 'fedavg'? allowed: fedavg, fedsdg
    """
    names = sorted(allowed)
    place = f" in {where}" if where else ""
    shown, similar = spelt(name, names), list[str]()
    if shown == brief(name):  # else it names the one that prints alike
        similar = difflib.get_close_matches(str(name)[:100], names, n=2)
    hint = f" did you mean {' or '.join(map(repr, similar))}?" if similar else ""
    return InputError(f"unknown {what} {shown}{place};{hint} {kind}: {', '.join(names)}")


def spelt(name: Any, names: Iterable[str]) -> str:
    """A name for a message; with escapes if another one of ``names`` prints alike, and that one.

    >>> print(spelt("Zu\u0308rich", ["Zürich"]), spelt("Bern", ["Zürich"]))
    'Zu\\u0308rich' (which prints like 'Z\\xfcrich') 'Bern'
    """
    text = printed(str(name))
    other = next((n for n in names if n != name and printed(n) == text), None)
    return brief(name) if other is None else f"{name!a} (which prints like {other!a})"


def printed(name: str) -> str:
    """The same text for names that print alike: letters composed, blanks alike, nothing unseen.

    >>> printed(" Zu\u0308rich\u00a02\u200d")
    'Zürich 2'
    """
    text = unicodedata.normalize("NFC", " ".join(name.split()))
    return "".join(character for character in text if character not in _UNSEEN)


def listed(names: Sequence[str], counts: Sequence[int] | None = None, few: int = FEW) -> str:
    """Return up to ``few`` names, each followed by its count, and how many are not shown.

    >>> listed(["oslo", "rome"], [4, 9])
    'oslo (4), rome (9)'
    """
    shown = [name or repr(name) for name in names[:few]]
    if counts is not None:
        shown = [f"{name} ({count:,})" for name, count in zip(shown, counts, strict=False)]
    more = f", and {len(names) - few:,} more" if len(names) > few else ""
    return ", ".join(shown) + more


def missing_file(path: str | Path, where: str = "", what: str = "file") -> InputError:
    """Return the error for a file of the kind ``what`` that isn't there; the message has one of its
    folder with a name much like it, and ``where`` it was looked for, or what files there can be.

    >>> print(missing_file("data/visit.csv"))
    no file 'data/visit.csv'
    """
    wanted = Path(path).expanduser()
    try:
        beside = [entry.name for entry in wanted.parent.iterdir() if entry.is_file()]
    except OSError:
        beside = []
    similar = difflib.get_close_matches(wanted.name[:100], beside, n=1)
    hint = f"; did you mean {str(Path(path).parent / similar[0])!r}?" if similar else ""
    return InputError(f"no {what} {brief(str(path))}{where}{hint}")


@contextmanager
def of_method(label: str) -> Iterator[None]:
    """Let an InputError inside name the method.

    >>> with of_method("fedper"):
    ...     raise InputError("the model has no recognised task head")
    Traceback (most recent call last):
    fedtailor.errors.InputError: fedper: the model has no recognised task head
    """
    try:
        yield
    except InputError as error:
        if label not in str(error):
            error.args = (f"{label}: {error}",)
        raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an OSError inside name the file: the error of a write, as on a full disk, does not.

    >>> with naming(Path("notes.txt")):
    ...     raise OSError(28, "No space left on device")
    Traceback (most recent call last):
    OSError: [Errno 28] No space left on device: 'notes.txt'
    """
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
