"""Who may ask the server for what."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import flwr.superlink.main
import pytest
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.proto.task_pb2 import Task
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.routers.runtime.tracing import RuntimeTracingMiddleware
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink import extensions
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers
from sqlalchemy import Engine, event
from starlette.middleware import Middleware
from starlette.requests import Request

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


@pytest.mark.slow
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


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Flower's own store in a file, with a run that is under way."""
    path = tmp_path_factory.mktemp("store") / "state.db"
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setenv("FLWR_DATABASE", str(path))
        warnings.simplefilter("ignore", DeprecationWarning)  # of Alembic, which Flower configures
        state = flwr.superlink.main.create_app().state.linkstate_factory.state()
    state.run = state.create_run(
        None, None, None, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP
    )
    state.path = path
    (run,) = state.get_run_info(run_ids=[state.run])
    assert state.claim_task(run.primary_task_id)
    assert state.activate_task(run.primary_task_id)
    state.node = state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, b"key", 30)
    state.activate_node(state.node, 30)
    yield state
    for one in (state, state.object_store):
        one._engine.dispose()


def asked(store: Any) -> Message:
    """A message to the node, which is stored."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = store.run, 1, 1
    message = Message(RecordDict(), store.node, MessageType.TRAIN, ttl=60)
    message.metadata.__dict__["_message_id"] = message.object_id
    assert store.store_message_ins(message) == message.object_id
    return message


def answering(store: Any, message: Message, records: int) -> Any:
    """The request with which the node announces its answer, and the answer."""
    content = RecordDict({str(k): ConfigRecord({"k": k}) for k in range(records)})
    reply = Message(content, reply_to=message)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    proto = message_to_proto(remove_content_from_message(reply))
    request = PushMessagesRequest(
        node=Node(node_id=store.node),
        messages_list=[proto],
        message_object_trees=[get_object_tree(reply)],
        clientapp_runtime_list=[1.0],
    )
    return request, reply


@pytest.mark.slow
def test_a_message_of_too_many_parts_becomes_an_error_that_says_so(
    store: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    bounded = superlink._bounded(fleet_handlers.push_messages, 12)
    few, many = asked(store), asked(store)
    request, reply = answering(store, few, 10)
    assert len(bounded(request=request, state=store).objects_to_push) == 12
    before = len(store.object_store)
    request, reply = answering(store, many, 11)
    assert not bounded(request=request, state=store).objects_to_push
    assert len(store.object_store) == before + 1
    said = "its message has 13 parts; at most 12 are stored"
    assert capsys.readouterr().err == f"fedtailor: node {store.node}: {said}\n"
    (stored,) = store.get_message_res({many.metadata.message_id}, store.run)
    assert stored.metadata.message_id != reply.object_id
    content = {stored.metadata.message_id: store.get_object(store.run, stored.metadata.message_id)}
    error = inflate_object_from_contents(stored.metadata.message_id, content)
    assert isinstance(error, Message)
    assert error.error.reason == said
    assert error.metadata.reply_to_message_id == many.metadata.message_id


@pytest.mark.slow
def test_a_store_that_fails_is_answered_with_503(
    store: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Locked by another, or full: for a part, too, of which Flower says that nobody waits for it.
    What is handed out is forgotten in the same transaction."""
    message = asked(store)
    request, reply = answering(store, message, 1)
    session = fleet_handlers.push_messages(request=request, state=store).session_id
    part = PushObjectRequest(
        node=request.node,
        run_id=store.run,
        object_id=reply.object_id,
        object_content=reply.deflate(),
        session_id=session,
    )
    push_object = superlink._honest(fleet_handlers.push_object)
    pull = PullAppMessagesRequest(message_ids=[message.metadata.message_id])
    pull_messages = superlink._whole(runtime_handlers.pull_messages)

    async def answer(call: Any) -> Any:
        async def call_next(request: Any) -> Any:
            return call()

        translated = superlink._translated(flwr.superlink.main.http_error_translator)
        return await translated(Request({"type": "http", "path": "/", "headers": []}), call_next)

    event.listen(Engine, "handle_error", superlink._note)
    try:
        with closing(sqlite3.connect(store.path, isolation_level=None)) as other:
            for one in (store, store.object_store):
                event.listen(one._engine, "checkout", _without_patience)
            other.execute("BEGIN IMMEDIATE")
            for call in (
                lambda: push_object(request=part, state=store),
                lambda: pull_messages(pull, store, Task(run_id=store.run)),
            ):
                response = asyncio.run(answer(call))
                assert response.status_code == 503
                assert response.body == b'{"detail":"Flower\'s store: database is locked"}'
            other.execute("ROLLBACK")
        assert push_object(request=part, state=store).stored
        pulled = pull_messages(pull, store, Task(run_id=store.run))
        assert len(pulled.messages_list) == 1
    finally:
        event.remove(Engine, "handle_error", superlink._note)
    told = capsys.readouterr().err
    assert "fedtailor: Flower's store fails, and who asks is told to ask again: database" in told


def _without_patience(connection: Any, *more: Any) -> None:
    connection.execute("PRAGMA busy_timeout = 1")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([(b"content-length", b"67108864")], None),
        ([(b"content-length", b"67108865")], 413),
        ([(b"content-length", b"9" * 17)], 413),
        ([(b"content-length", b"9" * 19)], 413),
        ([(b"transfer-encoding", b"chunked")], 413),
    ],
)
def test_a_request_is_bounded_before_it_is_read(headers: Any, status: int | None) -> None:
    reached, sent = [], []

    async def flower(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope)

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError

    path = "/v1/fleet/push-object"
    scope = {"type": "http", "path": path, "client": ("10.0.0.7", 1), "headers": headers}
    asyncio.run(OnlySites(flower)(scope, receive, send))
    assert bool(reached) == (status is None)
    assert [message["status"] for message in sent[:1]] == ([] if status is None else [status])


@pytest.mark.slow
def test_the_bounds_are_in_flowers_program() -> None:
    """In a process of its own, as Flower's program runs."""
    program = """
from fedtailor.deploy import superlink
superlink.bound_flower()
from flwr.superlink.main import create_app
from flwr.superlink.routers.fleet import router
from flwr.supercore import sql_mixin
app = create_app()
fleet, runtime = router.fleet_handlers, app.state.runtime_handlers
for one in (fleet.push_messages, fleet.push_object, runtime.push_object, runtime.pull_messages):
    print(one.__name__)
print(next(one.kwargs["dispatch"].__name__ for one in app.user_middleware if one.kwargs))
print(dict(sql_mixin.SQLITE_PRAGMAS)["busy_timeout"])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    names = "bounded", "honest", "honest", "whole", "translated", "25000"
    assert tuple(done.stdout.split()) == names
