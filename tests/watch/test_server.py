"""What the page's server answers, and to whom."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from fedtailor.errors import InputError
from fedtailor.watch import bounded
from fedtailor.watch.bounded import LOCAL
from fedtailor.watch.follow import Follower
from fedtailor.watch.server import PageServer

MakeRun = Callable[..., Path]
REFUSAL = '{"round": 4, "client": 2, "reason": "away"}\n'


@contextmanager
def serving(out: Path, host: str = LOCAL) -> Iterator[PageServer]:
    with PageServer(Follower(out), host, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server: PageServer, path: str, method: str = "GET", **headers: str) -> HTTPResponse:
    connection = HTTPConnection(*server.server_address[:2], timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    answer.content = answer.read()  # type: ignore[attr-defined]
    connection.close()
    return answer


def state(server: PageServer, known: object = 0) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(ask(server, f"/state?known={known}").content)  # type: ignore[attr-defined]
    return content


def test_the_page_and_its_files_load_nothing_from_elsewhere(make_run: MakeRun) -> None:
    with serving(make_run(done=3)) as server:
        for path in ("/", "/page.css", "/page.js", "/theme.js", "/vega.js"):
            answer = ask(server, path)
            assert answer.status == 200
            policy = answer.headers["Content-Security-Policy"]
            assert policy.startswith("default-src 'none'; script-src 'self' 'unsafe-eval';")
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            if path != "/vega.js":
                assert b"http" not in answer.content.replace(b"http://www.w3.org/2000/svg", b"")  # type: ignore[attr-defined]


def test_what_a_page_knows_is_not_sent_again(make_run: MakeRun) -> None:
    out = make_run(done=3)
    with serving(out) as server:
        first = state(server)
        assert first["labels"] == ["fedavg", "fedsdg"]
        assert first["trials"][1]["best"] == {
            "round": 2,
            "value": pytest.approx(0.05 * (12 + 10 / 6)),
        }
        assert first["specs"].keys() == {"curves", "losses"}
        assert state(server, first["version"]).keys() == {"version", "share"}
        (out / "methods/fedsdg/seed-0/refused.jsonl").write_text(REFUSAL)
        server._looked = 0.0  # as if a second had passed
        second = state(server, first["version"])
        assert [trial["refused"] for trial in second["trials"]] == [0, 1]
        assert state(server, "x") == state(server)
    with serving(out) as other:  # it may have taken the place of the first one
        assert "trials" in state(other, first["version"])


def test_a_damaged_run_is_told(make_run: MakeRun) -> None:
    out = make_run(done=3)
    (out / "experiment.json").write_text("{}")
    with pytest.raises(InputError):
        Follower(out)
    out = make_run("other", done=3)
    with serving(out) as server:
        (out / "methods/fedavg/seed-0/commit.json").write_text("{")
        assert state(server)["state"] == "waiting"
        server._looked = 0.0  # as if a second had passed
        assert "commit.json is not valid JSON" in state(server)["error"]


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:80", "localhost:1", "[::1]:80", "10.0.0.1"]
)
def test_this_machines_addresses_are_accepted(make_run: MakeRun, host: str) -> None:
    with serving(make_run(done=3)) as server:
        assert ask(server, "/state", Host=host).status == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "a b"]
)
def test_another_name_is_refused(make_run: MakeRun, host: str) -> None:
    with serving(make_run(done=3)) as server:
        assert ask(server, "/state", Host=host).status == 421


def test_nothing_else_is_answered(make_run: MakeRun) -> None:
    out = make_run(done=3)
    with serving(out) as server:
        for path in (
            "/experiment.json",
            "/../experiment.json",
            "/%2e%2e/x",
            "/report.html",
        ):
            assert ask(server, path).status == 404, path
        for method in ("POST", "PUT", "DELETE", "OPTIONS"):
            assert ask(server, "/state", method).status == 501
        (out / "report.html").symlink_to(out / "experiment.json")
        assert ask(server, "/report.html").status == 404
        (out / "report.html").unlink()
        (out / "report.html").write_text("whole")
        answer = ask(server, "/report.html")
        assert (answer.status, answer.content) == (200, b"whole")  # type: ignore[attr-defined]


def test_a_port_that_is_taken_is_told(make_run: MakeRun) -> None:
    out = make_run(done=3)
    with serving(out) as server:
        port = server.server_address[1]
        with pytest.raises(
            InputError, match=rf"listen at 127.0.0.1:{port}: Address already in use; ch"
        ):
            PageServer(Follower(out), LOCAL, port)


def test_a_browser_that_goes_away_is_no_news(
    make_run: MakeRun, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(make_run(done=3)) as server:
        for _ in range(5):
            browser = socket.create_connection(server.server_address[:2])
            reset = struct.pack("ii", 1, 0)  # closed without a word, as by a crash
            browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            browser.sendall(b"GET /vega.js HTTP/1.1\r\nHost: localhost\r\n\r\n")
            browser.close()
        assert state(server)["name"] == "letters"
    assert capfd.readouterr().err == ""


MALFORMED = (
    b"",
    b"\r\n",
    b"\0\xff\xfe\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET / HTTP/x\r\n\r\n",
    b"GET / HTTP/9999999999.1\r\n\r\n",
    b"GET / / HTTP/1.1\r\n\r\n",
    b"GET /" + 70_000 * b"x" + b" HTTP/1.1\r\n\r\n",
    b"GET http://[::1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET //[ HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET http://[x]/ HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: [\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: [v1.x]:y\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\n" + 200 * b"x: y\r\n" + b"\r\n",
    b"GET / HTTP/1.1\r\nHost localhost\r\n\r\n",
    b"GET /state?known=%ff%00[ HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /state?known=" + 5000 * b"9" + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"X\x1b[2J / HTTP/1.1\r\nHost: localhost\r\n\r\n",
)


def test_malformed_requests_are_refused_without_a_word(
    make_run: MakeRun, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(make_run(done=3)) as server:
        for request in MALFORMED:
            with socket.create_connection(server.server_address[:2], timeout=10) as browser:
                browser.sendall(request)
                browser.shutdown(socket.SHUT_WR)
                answer = browser.makefile("rb").read()
            assert not answer.startswith(b"HTTP/1.1 500"), request
        assert state(server)["name"] == "letters"
    assert capfd.readouterr().err == ""


def test_connections_that_drip_are_bounded_in_number_and_in_time(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bounded, "_MOST_OPEN", 8)
    with serving(make_run(done=3)) as server:
        before = threading.active_count()
        dripping = [socket.create_connection(server.server_address[:2]) for _ in range(40)]
        for browser in dripping:
            browser.sendall(b"GET / HT")
        assert state(server)["name"] == "letters"
        end = time.monotonic() + 5
        while (number := threading.active_count() - before) > 8 and time.monotonic() < end:
            time.sleep(0.02)
        assert number <= 8
        monkeypatch.setattr(bounded, "_PATIENCE", 0.2)
        begin, is_open = time.monotonic(), True
        while is_open and time.monotonic() < begin + 5:
            time.sleep(0.02)
            try:
                dripping[-1].sendall(b"T")  # often enough for a time limit between two bytes
            except ConnectionError:
                is_open = False
        assert not is_open
        for browser in dripping:
            browser.close()
    assert capfd.readouterr().err == ""


def test_an_answer_that_fails_is_one_line(
    make_run: MakeRun, capfd: pytest.CaptureFixture[str]
) -> None:
    out = make_run(done=3)
    with serving(out) as server:
        server.report_page = lambda: bytes(-1)  # type: ignore[method-assign]
        with pytest.raises(ConnectionError):
            ask(server, "/report.html")
    error = capfd.readouterr().err
    assert error == "fedtailor: a request was not answered: ValueError: negative count\n"
