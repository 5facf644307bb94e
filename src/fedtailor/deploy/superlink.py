"""``flower-superlink``, closed to all but the sites.

Flower's one port serves the sites, its own programs at the server, and the interface by which runs
are started and keys are registered. The last has no login in Flower 1.41, and a run's code is run
at every site: whoever reached the port could read what the sites keep. Here that interface, and the
one of Flower's programs, answer to the server's own machine alone.
"""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from flwr.superlink import extensions
from flwr.superlink.cli import flower_superlink
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse

_FOR_ALL = ("/v1/fleet/", "/health")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class OnlySites:
    """Refuses requests from other machines that are not those of a site's node."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve or refuse one request."""
        if scope["type"] == "http" and not scope["path"].startswith(_FOR_ALL):
            client = scope.get("client")
            if client is None or not ipaddress.ip_address(client[0]).is_loopback:
                await PlainTextResponse("for the server's own machine", 403)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def main() -> None:
    """Run Flower's program."""
    extensions.get_middleware = lambda: (Middleware(OnlySites),)
    sys.argv[0] = "flower-superlink"
    flower_superlink()


if __name__ == "__main__":
    main()
