"""``flower-superlink``, closed to all machines but the sites, and bounded in what a site stores.

One port of Flower serves the sites, Flower's programs on the server, and the interface that starts
runs and registers keys. In Flower 1.41 this interface has no login, and every site executes the
code of a run, so anyone who reaches the port could read the data of the sites. Here that interface,
and the one for Flower's programs, answer only to the server's own machine.

A message is stored part by part, in one transaction. While one of many parts is stored, Flower
answers everybody else with an error at which its programs end. Here a message of too many parts is
replaced by an error, transactions wait for each other, and a failure of the store (locked, a full
disk) is answered with 503, at which Flower's programs ask again.
"""

from __future__ import annotations

import ipaddress
import os
import sqlite3
import sys
import threading
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from fastapi import HTTPException
from flwr.app import Error
from flwr.app.message import make_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.supercore import sql_mixin
from flwr.supercore.inflatable.inflatable_object import get_object_tree, iterate_object_tree
from flwr.superlink import extensions
from flwr.superlink import main as superlink
from flwr.superlink.cli import flower_superlink
from flwr.superlink.main import create_app
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers
from sqlalchemy import Engine, event
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import OperationalError
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ..errors import announce, one_line, whole_number
from ..flower.patience import Trouble
from .subprocesses import MOST_PARTS, PARTS

_MOST_BYTES = 1 << 26  # of a request
_OPEN_PATHS = ("/v1/fleet/", "/health")
_LOCK = "25000"  # milliseconds for another transaction; Flower's programs wait 30 s for an answer
_TOO_LARGE = 101  # the code of an error in the place of a message

Handler = Callable[..., Any]

_trouble = Trouble("fedtailor: Flower's store fails, and who asks is told to ask again")
_seen = threading.local()  # error: the last one of the store in this thread


class OnlySites:
    """A filter that refuses large requests, and those of other machines but a site's node's."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse one request."""
        if scope["type"] == "http":
            client, headers = scope.get("client"), dict(scope["headers"])
            is_here = client is not None and ipaddress.ip_address(client[0]).is_loopback
            size = whole_number(headers.get(b"content-length", b"0").decode("latin-1"))
            refusal = None
            if not is_here and not scope["path"].startswith(_OPEN_PATHS):
                refusal = PlainTextResponse("for the server's own machine", 403)
            elif b"transfer-encoding" in headers or size is None or size > _MOST_BYTES:
                refusal = PlainTextResponse(f"a request has at most {_MOST_BYTES} bytes", 413)
            if refusal is not None:
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _bounded(push_messages: Handler, most: int) -> Handler:
    """Flower's handler of a node's message, which stores an error instead of too many parts."""

    def bounded(request: Any, state: Any) -> Any:
        parts = sum(1 for tree in request.message_object_trees for _ in iterate_object_tree(tree))
        if parts <= most or not request.messages_list:
            return push_messages(request=request, state=state)
        said = f"its message has {parts} parts; at most {most} are stored"
        announce(f"node {request.node.node_id}: {said}")
        message = message_from_proto(request.messages_list[0])
        error = make_message(metadata=message.metadata, error=Error(_TOO_LARGE, said))
        error.metadata.__dict__["_message_id"] = error.object_id
        del request.messages_list[:], request.message_object_trees[:]
        request.messages_list.append(message_to_proto(error))
        request.message_object_trees.append(get_object_tree(error))
        response = push_messages(request=request, state=state)
        if response.objects_to_push:
            run = error.metadata.run_id
            state.store_object(run, response.session_id, error.object_id, error.deflate())
            del response.objects_to_push[:]
        return response

    return bounded


def _whole(pull_messages: Handler) -> Handler:
    """Flower's handler that hands out messages, and forgets them: both, or neither."""

    def whole(request: Any, state: Any, task: Any) -> Any:
        with state.session():
            return pull_messages(request, state, task)

    return whole


def _honest(push_object: Handler) -> Handler:
    """Flower's handler of a part, which says of a store that fails what it says of a part that
    nobody waits for."""

    def honest(*given: Any, **named: Any) -> Any:
        _seen.error = None
        response = push_object(*given, **named)
        if not response.stored and _seen.error is not None:
            raise _seen.error
        return response

    return honest


def _note(context: ExceptionContext) -> None:
    if isinstance(context.sqlalchemy_exception, OperationalError):
        _seen.error = context.sqlalchemy_exception


def _translated(translate: Handler) -> Handler:
    """Flower's translation of errors into answers, with 503 where the store fails."""

    async def translated(request: Any, call_next: Handler) -> Any:
        async def call(request: Any) -> Any:
            try:
                return await call_next(request)
            except (OperationalError, sqlite3.OperationalError) as error:
                said = one_line(getattr(error, "orig", error))
                _trouble.failed(said)
                raise HTTPException(503, f"Flower's store: {said}") from None

        return await translate(request, call)

    return translated


def bound_flower() -> None:
    """Put these bounds into Flower's program, before it starts."""
    most = int(os.environ.get(MOST_PARTS, PARTS))
    fleet_handlers.push_messages = _bounded(fleet_handlers.push_messages, most)
    fleet_handlers.push_object = _honest(fleet_handlers.push_object)
    runtime_handlers.push_object = _honest(runtime_handlers.push_object)
    runtime_handlers.pull_messages = _whole(runtime_handlers.pull_messages)
    requests: Any = superlink
    requests.http_error_translator = _translated(requests.http_error_translator)
    event.listen(Engine, "handle_error", _note)
    store: Any = sql_mixin
    store.SQLITE_PRAGMAS = tuple({**dict(store.SQLITE_PRAGMAS), "busy_timeout": _LOCK}.items())


def main() -> None:
    """Run Flower's program, if the filter is the first to get a request."""
    only_sites = Middleware(OnlySites)
    extensions.get_middleware = lambda: (only_sites,)
    if create_app().user_middleware[:1] != [only_sites]:
        announce(
            f"with Flower {version('flwr')} any machine could start runs, since it doesn't put the "
            "filter of requests first; install flwr==1.41.0"
        )
        sys.exit(2)
    bound_flower()
    sys.argv[0] = "flower-superlink"
    try:
        flower_superlink()
    except (OperationalError, sqlite3.Error, OSError) as error:
        said = one_line(getattr(error, "orig", error))
        announce(f"Flower's SuperLink can't start: {said}")
        sys.exit(2)


if __name__ == "__main__":
    main()
