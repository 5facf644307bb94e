"""A site's clients: their private states, and failures that leave other clients alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, MessageType, RecordDict
from safetensors.torch import load_file

import fedtailor as ft
from fedtailor.data.omissions import Omission
from fedtailor.data.table import Dataset, Images
from fedtailor.flower import serve
from fedtailor.flower.client import Site
from fedtailor.flower.codec import pack, unpack
from fedtailor.flower.messages import NodeInfo, NodeQuery, RoundReply, RoundRequest, digest
from fedtailor.params import Params
from fedtailor.runs.build import named
from fedtailor.runs.experiment import Experiment
from tests.engine.test_privacy import backbone as without_norm
from tests.flower.grid import ANY, DIGITS, QUICK, experiment, grid
from tests.small import digits_backbone


@pytest.mark.slow
def test_a_client_that_has_lost_its_private_state_is_left_out(tmp_path: Path) -> None:
    chosen = experiment("fedper", rounds=2, cohort={})
    direct = grid(chosen, tmp_path / "clients")

    def lose(message: Message, reply: Message) -> Message:
        if message.metadata.group_id == "1":
            for path in (tmp_path / "clients").rglob("client-2/*"):
                path.unlink()
        return reply

    direct.change = lose
    out = serve(direct, chosen, tmp_path / "out", backbone=digits_backbone(), timeouts=QUICK)
    folder = out / "methods/fedper/seed-0"
    first, second = map(json.loads, (folder / "history.jsonl").read_text().splitlines())
    assert (first["cohort"], second["cohort"]) == ([0, 1, 2, 3, 4], [0, 1, 3, 4])
    refused = map(json.loads, (folder / "refused.jsonl").read_text().splitlines())
    reason = "client 2's private state of round 1 is missing at this node"
    assert {"round": 2, "client": 2, "reason": reason} in refused
    evaluated = map(json.loads, (folder / "clients.jsonl").read_text().splitlines())
    assert all(line["clients"] == [0, 1, 3, 4] for line in evaluated)


@pytest.mark.slow
def test_a_client_that_fails_leaves_the_others_of_its_node_alone(tmp_path: Path) -> None:
    chosen = experiment("fedper", rounds=2, cohort={})
    direct = grid(chosen, tmp_path / "clients", nodes=1)

    def spoil(message: Message, reply: Message) -> Message:
        if message.metadata.group_id == "1":
            (one,) = (tmp_path / "clients").rglob("client-2/round-000001.safetensors")
            one.write_bytes(b"damaged")
            (other,) = (tmp_path / "clients").rglob("client-3")
            (other / "round-000002.safetensors.new").mkdir()  # in the way of what it will write
        return reply

    direct.change = spoil
    out = serve(direct, chosen, tmp_path / "out", backbone=digits_backbone(), timeouts=QUICK)
    folder = out / "methods/fedper/seed-0"
    _, second = map(json.loads, (folder / "history.jsonl").read_text().splitlines())
    assert second["cohort"] == [0, 1, 4]
    refused = map(json.loads, (folder / "refused.jsonl").read_text().splitlines())
    reasons = {line["client"]: line["reason"] for line in refused if line["round"] == 2}
    assert reasons[2].startswith("the private state of round 1 is damaged: ")
    assert reasons[3] == "IsADirectoryError; the node prints more"


@pytest.mark.slow
def test_nodes_may_share_a_folder_that_is_their_users_alone(tmp_path: Path) -> None:
    chosen = experiment("fedper")
    direct = grid(chosen, tmp_path)
    app, _ = direct.apps[100]
    direct.apps = {node: (app, config) for node, (_, config) in direct.apps.items()}
    theirs: list[Path] = []  # what another node has begun to write

    def begin(message: Message, reply: Message) -> Message:
        if message.metadata.group_id == "2" and not theirs:
            (folder,) = (tmp_path / "node-0").rglob("seed-0")
            theirs.append(folder / "data.json.new")
            theirs[0].write_text("begun")
        return reply

    direct.change = begin
    serve(direct, chosen, tmp_path / "out", backbone=digits_backbone(), timeouts=QUICK)
    assert theirs[0].read_text() == "begun"
    assert json.loads(theirs[0].with_suffix("").read_text())["clients"] == 5
    (run,) = (tmp_path / "node-0").iterdir()
    assert run.stat().st_mode & 0o777 == 0o700


def test_under_privacy_no_message_tells_that_a_client_has_diverged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its site prints it; what it keeps is the state that it had."""
    options = {"rounds": 1, "cohort": {}, "privacy": {"noise": 1.0, "clip": 0.1}}
    chosen = experiment("fedper", **options)
    pictures = DIGITS.inputs.values / np.float32(255)
    federation = Site(chosen, tmp_path, data=DIGITS)._federation(0)
    pictures[federation.partition.train[2]] = np.nan
    spoiled = replace(DIGITS, inputs=Images(pictures), digest="")
    direct = grid(chosen, tmp_path / "clients", dataset=spoiled, model=without_norm)
    out = serve(direct, chosen, tmp_path / "out", backbone=without_norm(), timeouts=QUICK)
    folder = out / "methods/fedper/seed-0"
    (done,) = map(json.loads, (folder / "history.jsonl").read_text().splitlines())
    assert done["cohort"] == [0, 1, 2, 3, 4]
    assert [loss == 0 for loss in done["losses"]] == [False, False, True, False, False]
    trained = [m for m in direct.answered if m.metadata.message_type == MessageType.TRAIN]
    results = [one for m in trained for one in unpack(m.content, RoundReply, ANY)[0].results]
    assert not any(one.error or one.diverged for one in results)
    assert "the loss of client 2 is nan; under [privacy] it sends" in capsys.readouterr().err
    (kept,) = (tmp_path / "clients").rglob("client-2/round-000001.safetensors")
    head = without_norm().model.state_dict()["head.bias"]
    assert load_file(kept)["head.bias"].equal(head)


def test_under_privacy_of_records_hashes_of_data_tell_nothing_without_a_sites_key(
    tmp_path: Path,
) -> None:
    """Who knows all records but one can't try out what it is. Equal data have the same hash."""
    spent = {"level": "record", "noise": 1.0, "clip": 1.0, "delta": 0.1}
    chosen = experiment("fedavg", privacy=spent)
    changed = DIGITS.inputs.values.copy()
    changed[7] = 255 - changed[7]
    usual = replace(DIGITS, digest="")
    other = replace(DIGITS, inputs=Images(changed), digest="")

    def told(folder: str, data: Dataset = usual, chosen: Experiment = chosen) -> tuple[str, str]:
        site = Site(chosen, tmp_path / folder, data=data)
        content = site.node_info(pack(NodeQuery(digest(site.experiment))), {})
        info, _ = unpack(content, NodeInfo, ANY)
        return info.data, info.sizes[0].partition

    first = told("one")
    assert told("one") == first
    assert told("one", other)[0] != first[0]
    assert told("one", other)[1] == first[1]  # the same rows
    plain = told("other", chosen=experiment("fedavg"))
    assert plain[0] == usual.digest
    assert not {*told("two"), *first} & {*plain, *told("three")}
    (key,) = (tmp_path / "one").iterdir()
    assert key.stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_a_round_is_answered_again_for_the_same_settings_and_data_alone(tmp_path: Path) -> None:
    """The noise is the same: of two answers with one scale of it each, it could be worked out."""
    spent = {"level": "record", "noise": 1.0, "clip": 0.1, "delta": 0.1}
    slow = {"name": "linear", "within_rounds": True}
    options: dict[str, Any] = {"privacy": spent, "schedule": slow, "cohort": {"size": 5}}
    chosen = experiment("fedavg", rounds=1, **options)
    direct = grid(chosen, tmp_path / "sites", 1, model=without_norm)
    serve(direct, chosen, tmp_path / "out", backbone=without_norm(), timeouts=QUICK)
    sent = next(one for one in direct.sent if one.metadata.message_type == MessageType.TRAIN)
    order, payloads = unpack(sent.content, RoundRequest, ANY)

    def errors(now: Experiment, data: Dataset = DIGITS) -> set[str | None]:
        again = grid(now, tmp_path / "sites", 1, model=without_norm, dataset=data)
        told = digest(named(now, data, without_norm()))
        message = pack(replace(order, experiment=told), payloads)
        again.push_messages([Message(message, 100, MessageType.TRAIN)])
        (answered,) = again.answered
        reply, _ = unpack(answered.content, RoundReply, ANY)
        return {one.error for one in reply.results}

    same = experiment("fedavg", rounds=1, seeds=[0, 1], **options)
    assert errors(same) == {None}
    pictures = DIGITS.inputs.values.copy()
    pictures[0] = 255 - pictures[0]
    other = replace(DIGITS, inputs=Images(pictures), digest="")
    refused = {
        "a request for round 1 came after one for round 1 with other tensors, data or settings: a "
        "round is answered once, with its noise"
    }
    assert errors(chosen, other) == refused
    more_noise = {"privacy": {**spent, "noise": 2.0}}
    for changes in ({"rounds": 3}, more_noise, {"local": {"batch_size": 7}}):
        assert errors(experiment("fedavg", **{"rounds": 1, **options, **changes})) == refused


@pytest.mark.slow
def test_a_round_with_noise_on_records_goes_on_after_a_stop(tmp_path: Path) -> None:
    """The server reads its state from a file then, with its tensors in another order."""
    spent = {"level": "record", "noise": 1.0, "clip": 0.1, "delta": 0.1}
    chosen = experiment("fedavg", rounds=2, cohort={"size": 5}, privacy=spent)
    given: dict[str, Any] = {"backbone": without_norm(), "timeouts": QUICK}

    class Stopped(Exception):  # noqa: N818
        pass

    def stop(message: Message, reply: Message) -> Message:
        if message.metadata.group_id == "2":
            raise Stopped
        return reply

    direct = grid(chosen, tmp_path / "sites", 1, model=without_norm)
    direct.change = stop
    with pytest.raises(Stopped):
        serve(direct, chosen, tmp_path / "out", **given)
    direct = grid(chosen, tmp_path / "sites", 1, model=without_norm)
    out = serve(direct, chosen, tmp_path / "out", **given)
    lines = (out / "methods/fedavg/seed-0/history.jsonl").read_text().splitlines()
    assert [json.loads(line)["cohort"] for line in lines] == [[0, 1, 2, 3, 4]] * 2


def test_names_of_clients_stay_at_their_site(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    split = ft.SplitConfig(5, "natural", validation=0.2)
    wards = replace(
        DIGITS,
        groups=np.arange(len(DIGITS.inputs)) % 2,
        client_names=("ward 3", "ward 7"),
        omissions=(Omission("no-label", 2, "2 rows without a label, left out: ward 7 (2)"),),
    )
    chosen = replace(experiment("fedavg"), split=split)
    site = Site(chosen, tmp_path, clients=range(1, 3), data=wards, backbone=digits_backbone())
    site.load()
    assert "fedtailor: 2 rows without a label, left out: ward 7 (2)" in capsys.readouterr().err
    assert site._federation(0).names == ("", "ward 3", "ward 7", "", "")
    # what it says of a client may be sent
    training = site._new_session("a" * 32, "fedavg", 0).works.train
    assert training.federation.names is None


@pytest.mark.slow
def test_a_site_refuses_rounds_out_of_order_and_other_payloads(tmp_path: Path) -> None:
    chosen = experiment("fedper", cohort={})
    direct = grid(chosen, tmp_path / "clients", nodes=1)
    serve(direct, chosen, tmp_path / "out", backbone=digits_backbone(), timeouts=QUICK)
    trained = [m for m in direct.sent if m.metadata.message_type == MessageType.TRAIN]
    order, payloads = unpack(trained[-1].content, RoundRequest, ANY)
    (first,) = [request for request in order.requests if request.client == 0]
    states = {path: path.read_bytes() for path in (tmp_path / "clients").rglob("round-*")}

    def answer(order: RoundRequest, payload: Params | None = None, **changes: int) -> str:
        request = replace(first, **changes)
        sent = payloads if payload is None else [payload]
        content = pack(replace(order, requests=(request,)), sent)
        reply = direct.apps[100][0](
            Message(content, 100, MessageType.TRAIN),
            Context(1, 100, {}, RecordDict(), {}),
        )
        if reply.has_error():
            return str(reply.error.reason)
        return str(unpack(reply.content, RoundReply, ANY)[0].results[0].error)

    (payload,) = payloads
    assert answer(replace(order, round=10**9)) == (
        "the server asks for round 1000000000; this experiment has rounds 1 to 3"
    )
    assert answer(replace(order, clip=0.5)) == (
        "the server asks for the clip 0.5; allowed: none, without privacy.clip_quantile"
    )
    assert "out of order" in answer(order, base=3)
    assert "came after one to start from round 2" in answer(order, base=1, best=0)
    assert answer(order, {**payload, "more": payload["conv.weight"]}) == (
        "more of the payload is there; it must be left out"
    )
    assert "conv.weight of the payload is float32 (6, 9)" in answer(
        order, {**payload, "conv.weight": payload["conv.weight"].view(6, 9)}
    )
    wide = torch.cat([payload["conv.weight"]] * 2)  # as many axes as it has
    assert answer(order, {**payload, "conv.weight": wide}).startswith(
        "conv.weight of the payload is float32 (12, 1, 3, 3); it must be float32 (6, 1, 3, 3)"
    )
    assert "conv.weight of the payload is float64" in answer(
        order, {**payload, "conv.weight": payload["conv.weight"].double()}
    )
    content = pack(replace(order, requests=(first, first)), payloads)
    reply = direct.apps[100][0](
        Message(content, 100, MessageType.TRAIN), Context(1, 100, {}, RecordDict(), {})
    )
    assert str(reply.error.reason) == "a client is asked twice in one message"
    assert {p: p.read_bytes() for p in (tmp_path / "clients").rglob("round-*")} == states
    assert answer(order) == "None"
