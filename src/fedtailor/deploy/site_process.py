"""The process that has a site's data, model and private states.

Flower starts a process for each message. That process only forwards the message to this one, which
stays, so that data and model are loaded once. The two are connected by a socket in a folder that
only the user can open.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Listener

from flwr.app import MessageType, RecordDict

from ..errors import InputError, announce
from ..flower.client import Site
from ..flower.codec import FAULTS

Answer = tuple[RecordDict | None, str | None]  # one of the two: a message's content, or an error


def answers(site: Site, listener: Listener) -> Iterator[None]:
    """Answer the messages that ``listener`` receives, until interrupted; yield before each."""
    while True:
        with listener.accept() as connection:
            try:
                kind, content = connection.recv()
            except (EOFError, OSError):  # the sender has ended, before or within a message
                continue
            yield
            answer = reply(site, kind, content)
            with suppress(OSError):  # the sender has ended since
                connection.send(answer)


def reply(site: Site, kind: str, content: RecordDict) -> Answer:
    """Return the answer to a message. The site prints errors; the text of an unexpected one may
    show the data, so it is not sent."""
    try:
        if kind == MessageType.QUERY:
            return site.node_info(content, {}), None
        return site.work(content, {}), None
    except InputError as error:
        announce(error)
        return None, str(error)
    except FAULTS as error:
        traceback.print_exc()
        return None, f"{type(error).__name__}; the site prints more"
