"""Who may ask the server for what."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import flwr.superlink.main
import pytest
from flwr.supercore.routers.runtime.tracing import RuntimeTracingMiddleware
from flwr.superlink import extensions
from starlette.middleware import Middleware

from fedtailor.deploy import superlink
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


def test_flower_puts_the_filter_first(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(extensions, "get_middleware", extensions.get_middleware)
    monkeypatch.setattr(superlink, "bound_flower", lambda: None)
    monkeypatch.setattr(superlink, "flower_superlink", lambda: started.append(sys.argv[0]))
    monkeypatch.setattr(sys, "argv", ["superlink"])
    superlink.main()
    assert started == ["flower-superlink"]


@pytest.mark.parametrize("middleware", [[], [Middleware(RuntimeTracingMiddleware)]])
def test_a_flower_that_does_not_is_not_started(
    middleware: list[Middleware],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(extensions, "get_middleware", extensions.get_middleware)
    monkeypatch.setattr(flwr.superlink.main, "_get_middleware", lambda: middleware)
    with pytest.raises(SystemExit) as ended:
        superlink.main()
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "any machine could start runs" in told
    assert told.count("\n") == 1
