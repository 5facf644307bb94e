"""Who may ask the server for what."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fedtailor.deploy.superlink import OnlySites


@pytest.mark.parametrize(
    ("client", "path", "served"),
    [
        (("10.0.0.7", 1), "/v1/fleet/pull-messages", True),
        (("10.0.0.7", 1), "/v1/control/start-run", False),
        (("10.0.0.7", 1), "/v1/runtime/acquire-task", False),
        (("10.0.0.7", 1), "/docs", False),
        (("10.0.0.7", 1), "/v1/fleet", False),
        (("::ffff:10.0.0.7", 1), "/v1/control/start-run", False),
        (None, "/v1/control/start-run", False),
        (("127.0.0.1", 1), "/v1/control/start-run", True),
        (("::1", 1), "/v1/runtime/acquire-task", True),
    ],
)
def test_runs_are_started_from_the_servers_own_machine(
    client: Any, path: str, served: bool
) -> None:
    reached, sent = [], []

    async def flower(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["path"])

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request"}

    scope = {"type": "http", "path": path, "client": client, "headers": []}
    asyncio.run(OnlySites(flower)(scope, receive, send))
    assert bool(reached) == served
    assert served or sent[0]["status"] == 403


def test_flower_takes_the_filter_where_it_is_put() -> None:
    from flwr.superlink import extensions, main

    assert callable(extensions.get_middleware)
    assert "extensions.get_middleware()" in _source(main)


def _source(module: Any) -> str:
    import inspect

    return inspect.getsource(module)
