"""The SuperLink fails in all the ways that Flower has of saying so, and the run goes on."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import pytest
from flwr.app import Message, MessageType
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.runtime_pb2 import GetNodesResponse
from flwr.supercore.exit import ExitCode
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.supercore.logger import log
from flwr.supercore.run import RunNotRunningException
from flwr.superlink.grid import HttpGrid
from sqlalchemy.exc import IntegrityError, OperationalError

from fedtailor.errors import DivergedError, InputError
from fedtailor.flower import nodes as nodes_of_grid
from fedtailor.flower import patience, serve, server_app
from fedtailor.flower.patience import PatientGrid, Trouble
from tests.flower.grid import QUICK, DirectGrid, experiment, grid
from tests.small import digits_backbone


class GrpcError(grpc.RpcError, grpc.Call):  # type: ignore[misc]
    """As a stub of grpc raises it."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "no details"


def answer(status: int, text: str = "") -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "http://127.0.0.1:8000/v1/runtime/push-messages")
    response = httpx.Response(status, text=text, request=request)
    return httpx.HTTPStatusError("Server error", request=request, response=response)


def of_store(said: str) -> OperationalError:
    return OperationalError("UPDATE node", {}, sqlite3.OperationalError(said))


PASSING: tuple[tuple[Exception, str], ...] = (
    (httpx.ConnectError("[Errno 111] Connection refused"), "ConnectError: [Errno 111]"),
    (httpx.ReadTimeout("timed out"), "ReadTimeout: timed out"),
    (httpx.RemoteProtocolError("Server disconnected"), "RemoteProtocolError: Server"),
    (answer(500, '{"detail":"Internal server error."}'), "HTTP 500 Internal Server Error {"),
    (answer(503, "Flower's store: disk"), "HTTP 503 Service Unavailable Flower's store: disk"),
    (answer(429), "HTTP 429 Too Many Requests"),
    (GrpcError(grpc.StatusCode.UNAVAILABLE), "UNAVAILABLE no details"),
    (GrpcError(grpc.StatusCode.INTERNAL), "INTERNAL no details"),
    (GrpcError(grpc.StatusCode.RESOURCE_EXHAUSTED), "RESOURCE_EXHAUSTED no details"),
    (GrpcError(grpc.StatusCode.DEADLINE_EXCEEDED), "DEADLINE_EXCEEDED no details"),
    (of_store("database is locked"), "database is locked"),
    (of_store("database or disk is full"), "database or disk is full"),
    (sqlite3.OperationalError("disk I/O error"), "OperationalError: disk I/O error"),
    (ObjectPushError("f" * 64, 1, "s"), "ObjectPushError: Failed to push object"),
    (ConnectionRefusedError(111, "Connection refused"), "ConnectionRefusedError: [Errno 111]"),
    (OSError(28, "No space left on device"), "OSError: [Errno 28] No space left"),
)
LASTING: tuple[tuple[Exception, str], ...] = (
    (answer(400, "no such run"), "Flower's SuperLink refuses: HTTP 400 Bad Request no such run"),
    (GrpcError(grpc.StatusCode.PERMISSION_DENIED), "refuses: PERMISSION_DENIED no details"),
    (IntegrityError("INSERT", {}, sqlite3.IntegrityError("twice")), "refuses: twice"),
    (RunNotRunningException(), "Flower has ended this run; the same command goes on after the"),
)


@dataclass
class FailingGrid(DirectGrid):
    """A Grid that raises ``errors``, one at each call, until none is left; ``stuck`` is called
    before the answer to a message is pulled."""

    errors: Iterator[Exception] = field(default_factory=lambda: iter(()))
    stuck: Callable[[str], None] = lambda number: None

    def _fail(self) -> None:
        for error in self.errors:
            raise error

    def get_node_ids(self) -> Iterable[int]:
        self._fail()
        return super().get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        self._fail()
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        self._fail()
        numbers = list(message_ids)
        for number in numbers:
            self.stuck(number)
        return super().pull_messages(numbers)


def failing(chosen: Any, folder: Path, nodes: int = 2, **given: Any) -> FailingGrid:
    return FailingGrid(grid(chosen, folder, nodes=nodes).apps, **given)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses of no length."""
    monkeypatch.setattr(patience, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(patience, "_LONGEST_PAUSE", 0.004)


def same_files(one: Path, other: Path) -> None:
    for name in ("history.jsonl", "clients.jsonl", "server.safetensors"):
        paths = [out / "methods/fedper/seed-0" / name for out in (one, other)]
        assert paths[0].read_bytes() == paths[1].read_bytes(), name


@pytest.mark.slow
@pytest.mark.usefixtures("hasty")
def test_a_run_waits_for_a_superlink_that_fails_and_ends_with_the_same_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever call fails: two of three do, each time with the next kind of error."""
    chosen = experiment("fedper", rounds=2)
    given = {"backbone": digits_backbone(), "timeouts": replace(QUICK, reply=20.0)}
    near = serve(grid(chosen, tmp_path / "near"), chosen, tmp_path / "one", **given)
    capsys.readouterr()
    kinds = [error for error, _ in PASSING]

    def two_of_three() -> Iterator[Exception]:
        for number in range(3 * len(kinds)):
            yield kinds[number % len(kinds)]
            yield kinds[(number + 5) % len(kinds)]
            return_early.append(number)

    return_early: list[int] = []
    direct = failing(chosen, tmp_path / "far", errors=two_of_three())
    far = serve(direct, chosen, tmp_path / "other", **given)
    same_files(near, far)
    assert len(return_early) >= len(kinds)
    told = capsys.readouterr().err
    assert "waiting for Flower's SuperLink: ConnectError: [Errno 111] Connection refused" in told
    assert "waiting for Flower's SuperLink: over after" in told
    assert "Traceback" not in told


@pytest.mark.parametrize(("error", "words"), PASSING, ids=[w[:16] for _, w in PASSING])
def test_what_passes_is_asked_again_and_named(
    error: Exception, words: str, hasty: None, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = PatientGrid(FailingGrid({7: (None, {})}, errors=iter([error] * 2)), 5.0)  # type: ignore[dict-item]
    assert calls.node_ids() == {7}
    first, last = capsys.readouterr().err.splitlines()
    assert first.startswith(f"waiting for Flower's SuperLink: {words}")
    assert last.startswith("waiting for Flower's SuperLink: over after")


@pytest.mark.parametrize(("error", "words"), LASTING, ids=[w[-16:] for _, w in LASTING])
def test_what_lasts_ends_the_run_in_one_line(error: Exception, words: str) -> None:
    calls = PatientGrid(FailingGrid({}, errors=iter([error])), 5.0)
    with pytest.raises(InputError, match=words):
        calls.node_ids()


@pytest.mark.slow
@pytest.mark.usefixtures("hasty")
def test_a_server_that_gave_up_goes_on_with_the_same_command(tmp_path: Path) -> None:
    chosen = experiment("fedper", rounds=2)
    given = {"backbone": digits_backbone(), "timeouts": replace(QUICK, outage=0.05)}
    near = serve(grid(chosen, tmp_path / "near"), chosen, tmp_path / "one", **given)
    direct = failing(chosen, tmp_path / "far")

    def gone(message: Message, reply: Message) -> Message:
        if message.metadata.group_id == "2":  # for good, while the round is on its way
            direct.errors = iter(lambda: of_store("database or disk is full"), None)
        return reply

    direct.change = gone
    with pytest.raises(InputError, match="the same command goes on"):
        serve(direct, chosen, tmp_path / "other", **given)
    far = serve(failing(chosen, tmp_path / "far"), chosen, tmp_path / "other", **given)
    same_files(near, far)


@pytest.mark.slow
@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("kind", ["stalls", "fails"])
def test_an_answer_that_does_not_come_through_holds_up_no_other(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A site announces its answer and sends it never, or one at which the SuperLink fails."""
    monkeypatch.setattr(nodes_of_grid, "_BRIEF", 0.05)
    chosen = experiment("fedavg", rounds=2, cohort={})
    direct, over = failing(chosen, tmp_path / "clients", nodes=5), threading.Event()

    def stuck(number: str) -> None:
        message = direct.sent[int(number.split()[1])].metadata
        if message.message_type == MessageType.TRAIN and message.dst_node_id == 101:
            if kind == "fails":
                raise answer(500)
            over.wait(30)

    direct.stuck = stuck
    given = {"backbone": digits_backbone(), "timeouts": replace(QUICK, reply=0.6)}
    try:
        out = serve(direct, chosen, tmp_path / "out", **given)
    finally:
        over.set()
    told = capsys.readouterr().err
    assert "fedavg, seed 0, round 1: without client 1: no reply in 0.6 s" in told
    lines = (out / "methods/fedavg/seed-0/history.jsonl").read_text()
    assert lines.count('"cohort": [0, 2, 3, 4]') == 2


def test_a_trouble_is_named_at_once_and_then_at_growing_intervals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 1000.0
    monkeypatch.setattr(patience, "time", SimpleNamespace(monotonic=lambda: now))
    trouble = Trouble("waiting")
    for _ in range(20_000):
        trouble.failed("locked")
        now += 1
    trouble.over()
    for _ in range(700):  # it works now and then
        trouble.failed("locked")
        trouble.over()
        now += 1
    now += 60
    trouble.failed("full")
    lines = capsys.readouterr().err.splitlines()
    said = [0, 10, 30, 70, 150, 310, 630, 1230]
    assert lines[0] == "waiting: locked"
    assert lines[1:8] == [f"waiting: locked, for {number} s now" for number in said[1:]]
    over = lines.index("waiting: over after 20000 s")
    assert lines[over + 1 :] == ["waiting: locked", "waiting: over after 0 s", "waiting: full"]
    assert over < 50


@contextmanager
def superlink(answers: Iterator[tuple[int, bytes]]) -> Iterator[str]:
    """An address at which each request gets the next answer: a status and content."""

    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            status, content = next(answers)
            self.send_response(status)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            return

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def test_each_request_of_flowers_own_grid_is_repeated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where Flower gives up by itself, as at 500: it does so with its heartbeats, too."""
    monkeypatch.setattr("random.uniform", lambda low, high: 0.01)  # Flower's pauses
    nodes = GetNodesResponse(nodes=[NodeInfo(node_id=5)]).SerializeToString()
    answers = iter(
        [(500, b"locked"), (503, b""), (500, b"locked"), (200, nodes), *[(500, b"")] * 99]
    )
    with superlink(answers) as address:
        own = HttpGrid(address, insecure=True, token="x")
        calls = PatientGrid(own, 0.5)
        assert calls.node_ids() == {5}
        told = capsys.readouterr().err
        assert "waiting for Flower's SuperLink: HTTP 500 Internal Server Error locked" in told
        assert "waiting for Flower's SuperLink: over" in told
        with pytest.raises(InputError, match=r"SuperLink has failed for 0.5 s: HTTP 500 .*; the s"):
            calls.node_ids()
        own.close()


@pytest.mark.parametrize(
    "error", [InputError("3 of 5"), DivergedError("3 of 5"), OSError(28, "3 of 5")]
)
def test_an_expected_error_is_one_line_of_flowers_log(
    error: Exception, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server_app(experiment("fedavg"), tmp_path / "out")
    try:
        raise error
    except type(error) as caught:
        log(logging.ERROR, "%s raised an exception", "ServerApp", exc_info=caught)
    log(logging.ERROR, f"Exit Code: {ExitCode.SERVERAPP_EXCEPTION}\nAn unhandled exception")
    (record,) = caplog.records
    assert (record.getMessage(), record.exc_info) == ("3 of 5", None)
