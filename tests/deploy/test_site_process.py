"""A site's process, asked over its socket."""

from __future__ import annotations

import runpy
import socket
import struct
import threading
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message, MessageType, RecordDict

from fedtailor.cli import main
from fedtailor.deploy.folder import Deployment, at_site, init, open_folder
from fedtailor.deploy.site_process import answers, reply
from fedtailor.flower.client import Site
from fedtailor.flower.codec import Limits, pack, unpack
from fedtailor.flower.messages import NodeInfo, NodeQuery, digest
from tests.flower.grid import DirectGrid

EXPERIMENT = """
data.classes = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
model = {name = "cnn", pretrained = false, width = 0.1, image_size = 16}
methods.fedper = {}
"""


NOTES = """
data.classes = ["acq", "earn"]
model.name = "minilm"
methods.fedsdg = {}
"""


class EndOfTest(BaseException):
    """What stops the process in this test, as a signal does."""


def test_messages_are_handed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the app that `init` writes, as Flower's process loads it."""
    (tmp_path / "e.toml").write_text(EXPERIMENT)
    init(tmp_path / "dir", tmp_path / "e.toml", ["a"], "127.0.0.1:8000")
    deployment = open_folder(tmp_path / "dir")
    own = at_site(deployment.experiment, "digits", ["limit=30"])
    site = Site(own, deployment.site("a"), clients=deployment.clients("a"))
    monkeypatch.setenv("FEDTAILOR_SITE", str(tmp_path / "s"))
    app = runpy.run_path(str(tmp_path / "dir/app/client.py"))["app"]
    with Listener(str(tmp_path / "s"), "AF_UNIX") as listener:
        thread = threading.Thread(target=_serve, args=(site, listener), daemon=True)
        thread.start()
        Client(str(tmp_path / "s")).close()  # a sender that ends at once harms nobody
        DirectGrid({})  # which tells Flower's messages who we are

        def ask(content: RecordDict, kind: str) -> Message:
            message = Message(content, 1, kind)
            message.metadata.__dict__["_message_id"] = "1"
            reply: Message = app(message, Context(1, 1, {}, RecordDict(), {}))
            return reply

        question = pack(NodeQuery(digest(deployment.experiment)))
        node_info, _ = unpack(ask(question, MessageType.QUERY).content, NodeInfo, Limits())
        assert node_info.clients == (0,)
        assert sum(map(sum, (node_info.sizes[0].train, node_info.sizes[0].test))) <= 30
        other = ask(pack(NodeQuery("another")), MessageType.QUERY)
        assert other.error.reason == (
            "the server's experiment is not the one at this node; give both the same file"
        )
        damaged = ask(question, MessageType.TRAIN)
        assert damaged.error.reason.startswith("a NodeQuery instead of")
        with socket.socket(socket.AF_UNIX) as killed:  # while it handed on 99 bytes
            killed.connect(str(tmp_path / "s"))
            killed.sendall(struct.pack("!i", 99) + b"a part")
        with Client(str(tmp_path / "s")) as connection:
            connection.send(("query", EndOfTest))
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture
def notes(tmp_path: Path) -> tuple[Deployment, Path]:
    """A site's file, in which the second column is nobody else's business."""
    (tmp_path / "e.toml").write_text(NOTES)
    init(tmp_path / "dir", tmp_path / "e.toml", ["a"], "127.0.0.1:8000")
    (tmp_path / "a.csv").write_text("text,note,label\nbuys,Ada,acq\nprofit,Ada,earn\n" * 9)
    return open_folder(tmp_path / "dir"), tmp_path / "a.csv"


def test_what_stands_in_the_data_stays(
    notes: tuple[Deployment, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    deployment, path = notes
    own = at_site(deployment.experiment, str(path), ["label=note"])
    site = Site(own, deployment.site("a"), clients=deployment.clients("a"))
    question = pack(NodeQuery(digest(deployment.experiment)))
    content, error = reply(site, MessageType.QUERY, question)
    assert content is None
    assert error is not None
    assert error.startswith("the data at this node can't be used")
    assert "Ada" not in error
    assert "unknown label 'Ada'" in capsys.readouterr().err

    class Broken:
        def node_info(self, content: Any, node: Any) -> Any:
            raise KeyError("Ada")

    assert reply(Broken(), MessageType.QUERY, question) == (  # type: ignore[arg-type]
        None,
        "KeyError; the site prints more",
    )
    assert "KeyError: 'Ada'" in capsys.readouterr().err


def test_data_that_cannot_be_used_are_one_line_at_the_site(
    notes: tuple[Deployment, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    deployment, path = notes
    given = ["--site", "a", "--data", str(path), "--set", "label=note", "--insecure"]
    assert main(["deploy", "client", str(deployment.folder), *given]) == 2
    warned, told = capsys.readouterr().err.splitlines()
    assert "--insecure" in warned
    assert told.startswith("fedtailor: unknown label 'Ada' in row 1 of the training rows")


def test_a_site_with_the_data_of_another_one_does_not_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "e.toml").write_text(NOTES.replace("model", 'data.client = "ward"\nmodel'))
    init(tmp_path / "dir", tmp_path / "e.toml", ["a", "b"], "127.0.0.1:8000")
    (tmp_path / "b.csv").write_text("text,ward,label\n" + "buys,b,acq\nprofit,b,earn\n" * 9)
    given = ["--site", "a", "--data", str(tmp_path / "b.csv"), "--insecure"]
    assert main(["deploy", "client", str(tmp_path / "dir"), *given]) == 2
    assert "the data have rows of 'b', which is another site" in capsys.readouterr().err


def _serve(site: Any, listener: Listener) -> None:
    class Ending:
        def node_info(self, content: Any, node: Any) -> Any:
            if content is EndOfTest:
                raise EndOfTest
            return site.node_info(content, node)

        work = site.work

    try:
        for _ in answers(Ending(), listener):  # type: ignore[arg-type]
            pass
    except EndOfTest:
        return
