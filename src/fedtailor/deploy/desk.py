"""The process that has a site's data, model and private states.

Flower starts a process for each message. That one only hands the message to this, which stays, so
that data and model are loaded once. The two meet at a socket in a folder that is the user's alone.
"""

from __future__ import annotations

from contextlib import suppress
from multiprocessing.connection import Listener
from typing import NoReturn

from flwr.app import MessageType, RecordDict

from ..errors import InputError
from ..flower.client import Site

Answer = tuple[RecordDict | None, str | None]  # one of the two: a message's content, or an error


def answer(site: Site, listener: Listener) -> NoReturn:
    """Serve what ``listener`` brings, until interrupted."""
    while True:
        with listener.accept() as connection:
            try:
                kind, content = connection.recv()
            except (EOFError, OSError):  # its sender has ended, before or within a message
                continue
            found = _answer(site, kind, content)
            with suppress(OSError):  # it has ended since
                connection.send(found)


def _answer(site: Site, kind: str, content: RecordDict) -> Answer:
    try:
        if kind == MessageType.QUERY:
            return site.census(content, {}), None
        return site.work(content, {}), None
    except InputError as error:
        return None, str(error)
    except (RuntimeError, ValueError, LookupError, TypeError, ArithmeticError, OSError) as error:
        return None, f"{type(error).__name__}: {error}"
