"""A server of HTTP for few: connections are bounded in number, and each request in time."""

from __future__ import annotations

import ipaddress
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from ..errors import InputError, announce, one_line

LOCAL = "127.0.0.1"
_PATIENCE = 60.0  # seconds for a client to ask, and to take the answer
_MOST_OPEN = 64  # connections, each with a thread


class BoundedServer(ThreadingHTTPServer):
    """Answers each connection in a thread of its own, at ``host``, of which only 127.0.0.1 and its
    like are out of others' reach, and ``port``; 0 takes a free one. InputError if it can't
    listen."""

    daemon_threads = True
    request_queue_size = _MOST_OPEN  # connections that wait to be taken

    def __init__(self, host: str, port: int, handler: type[BoundedHandler]) -> None:
        host = host.strip("[]")
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.host = host
        try:
            super().__init__((host, port), handler)
        except OSError as error:
            words = f"{error.strerror}; choose another address or port"
            raise InputError(f"can't listen at {host}:{port}: {words}") from None
        self._open: dict[socket.socket, float] = {}  # the connections, and when their request began

    @property
    def url(self) -> str:
        """Where a browser finds the page."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.server_address[1]}/"

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches it."""
        is_loopback = _is_number(self.host) and ipaddress.ip_address(self.host).is_loopback
        return self.host == "localhost" or is_loopback

    def accepts(self, host: str) -> bool:
        """Whether ``host``, a request's header, names this machine: by a number, which can't be
        made to point elsewhere, or by a name that is its own."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:  # such as [ without ]
            return False
        own = {"localhost", self.host.lower(), socket.gethostname().lower()}
        return name in own or _is_number(name)

    def handle_error(self, request: object, client_address: object) -> None:
        """Say in a line what went wrong, and nothing of a browser that has gone away."""
        error = sys.exception()
        if not isinstance(error, ConnectionError | TimeoutError):
            what = one_line(f"{type(error).__name__}: {error}")
            announce(f"a request was not answered: {what}")

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread of its own; of too many, the one that has waited longest
        is closed."""
        if len(self._open) >= _MOST_OPEN:
            self._end(min(list(self._open.items()), key=lambda one: one[1])[0])
        self.note(request)
        super().process_request(request, client_address)

    def note(self, connection: socket.socket) -> None:
        """Note that a request begins."""
        self._open[connection] = time.monotonic()

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Close connections whose request takes too long: `serve_forever` calls this often."""
        latest = time.monotonic() - _PATIENCE
        for connection, begin in list(self._open.items()):
            if begin < latest:
                self._end(connection)

    def _end(self, connection: socket.socket) -> None:
        self._open.pop(connection, None)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


class BoundedHandler(BaseHTTPRequestHandler):
    """Answers one client, request by request."""

    server: BoundedServer
    protocol_version = "HTTP/1.1"
    timeout = _PATIENCE

    def handle_one_request(self) -> None:
        """Answer a request, which begins now."""
        self.server.note(self.connection)
        super().handle_one_request()

    def send(
        self, status: HTTPStatus, kind: str, content: bytes, headers: Mapping[str, str]
    ) -> None:
        """Send a whole answer of a MIME ``kind``, with more ``headers``."""
        length = str(len(content))
        known = {"Content-Type": kind, "Content-Length": length, "Cache-Control": "no-store"}
        self.send_response(status)
        for name, value in {**known, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def version_string(self) -> str:
        return "fedtailor"

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: a request is no news."""


def _is_number(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
