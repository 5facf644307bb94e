"""Which node serves which client, and which clients have none."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Message, MessageType

from fedtailor.data.federation import Federation
from fedtailor.data.table import Partition, Shares
from fedtailor.errors import InputError
from fedtailor.flower import serve
from tests.flower.grid import DIGITS, QUICK, experiment, grid
from tests.small import digits, digits_backbone


def test_every_client_must_have_a_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = experiment("fedavg")
    direct = grid(chosen, tmp_path / "clients", nodes=3)
    del direct.apps[101]
    with pytest.raises(InputError, match="no node serves clients 1, 4"):
        serve(direct, chosen, tmp_path / "out", backbone=digits_backbone(), timeouts=QUICK)
    assert capsys.readouterr().err.count("waiting: no node serves clients 1, 4") == 1
    names = ("a", "b", "c", "d", "e")
    named = {"backbone": digits_backbone(), "timeouts": QUICK, "names": names}
    with pytest.raises(InputError, match="no node serves clients b, e"):
        serve(direct, chosen, tmp_path / "out", **named)
    direct.apps.clear()
    with pytest.raises(InputError, match="there are no nodes"):
        serve(direct, chosen, tmp_path / "out", backbone=digits_backbone(), timeouts=QUICK)


def test_a_node_comes_back_with_the_examples_that_it_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = experiment("fedavg", rounds=2, cohort={})
    direct = grid(chosen, tmp_path / "clients")
    small = replace(DIGITS, num_train=900)
    others = grid(chosen, tmp_path / "others", dataset=small)

    def exchange(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == MessageType.EVALUATE:
            return reply
        if message.metadata.group_id == "1" and message.metadata.dst_node_id == 101:
            direct.apps[102] = others.apps[101]
            del direct.apps[101]
        return reply

    direct.change = exchange
    serve(direct, chosen, tmp_path / "out", backbone=digits_backbone(), timeouts=QUICK)
    told = capsys.readouterr().err
    assert "round 2: node 102: client 1 no longer has the examples that it had" in told
    assert "round 2: without client 3: no node serves it" in told


def test_nodes_that_no_message_reaches_are_told_each(tmp_path: Path) -> None:
    chosen = experiment("fedavg", rounds=1, cohort={})
    direct = grid(chosen, tmp_path / "clients", nodes=5)

    def gone(message: Message, reply: Message) -> Message:
        train = message.metadata.message_type == MessageType.TRAIN
        direct.lost = {102, 104} if train and message.metadata.dst_node_id == 100 else direct.lost
        return reply

    direct.change = gone
    out = serve(direct, chosen, tmp_path / "out", backbone=digits_backbone(), timeouts=QUICK)
    folder = out / "methods/fedavg/seed-0"
    assert json.loads((folder / "history.jsonl").read_text())["cohort"] == [0, 1, 3]
    refused = list(map(json.loads, (folder / "refused.jsonl").read_text().splitlines()))
    reason = "the message could not be sent; the node may have left"
    assert {2, 4} == {line["client"] for line in refused}
    assert {reason} == {line["reason"] for line in refused}


def test_clients_go_by_what_the_server_calls_them(tmp_path: Path) -> None:
    chosen = experiment("fedavg", rounds=1, cohort={})
    direct = grid(chosen, tmp_path / "clients")
    out, names = tmp_path / "out", ("berlin", "lagos", "oslo.0", "oslo.1", "rome")
    fields = {"backbone": digits_backbone(), "timeouts": QUICK}
    with pytest.raises(InputError, match="2 names for 5 clients: give one for each"):
        serve(direct, chosen, out, names=("a", "b"), **fields)
    assert not out.exists()
    serve(direct, chosen, out, names=names, **fields)
    assert json.loads((out / "partitions/seed-0.json").read_text())["names"] == list(names)
    lines = (out / "methods/fedavg/seed-0/clients.jsonl").read_text().splitlines()
    assert all(json.loads(line)["names"] == list(names) for line in lines)
    assert "fedavg, seed 0: round 1 of 1, 5 clients, loss " in (out / "run.log").read_text()


def test_a_claim_of_many_examples_takes_no_memory() -> None:
    claimed = Shares(np.broadcast_to(np.int64(0), 10**9), np.array([0, 10**9]))
    federation = Federation(digits(), Partition(claimed, claimed, claimed, "d"), 0, remote=True)
    tracemalloc.start()
    try:
        sizes = [federation.num_rows(0, split) for split in ("train", "validation", "test")]
        assert sizes == [10**9] * 3
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()
