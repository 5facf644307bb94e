"""Secure aggregation over Flower: the run in one process, to the bit; sites that leave or cheat."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Error, Message, MessageType
from safetensors.torch import load_file

import fedtailor as ft
from fedtailor.errors import InputError
from fedtailor.flower import Timeouts, serve
from fedtailor.flower.client import Site
from fedtailor.flower.codec import pack, unpack
from fedtailor.flower.masking import SiteMasks
from fedtailor.flower.messages import Masking, RoundReply, RoundRequest
from fedtailor.params import flat
from fedtailor.runs.experiment import Experiment
from fedtailor.store.files import read_json, write_json
from fedtailor.uploads.secure.config import SecureAggregationConfig
from fedtailor.uploads.secure.messages import Order, Weighing
from tests.engine.test_privacy import backbone
from tests.flower.grid import ANY, DIGITS, DirectGrid, experiment, grid
from tests.small import digits_backbone, same_bits

QUICK = Timeouts(start=20.0, reply=20.0, poll=0.0)
FOLDER = "methods/fedbn/seed-0"


def masked(**more: Any) -> Experiment:
    options = {"rounds": 2, "cohort": {"size": 4}, "secure_aggregation": {"threshold": 0.6}}
    return experiment("fedbn", **{**options, **more})


def history(out: Path, method: str = "fedbn") -> list[dict[str, Any]]:
    path = out / f"methods/{method}/seed-0/history.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def far(direct: DirectGrid, chosen: Experiment, out: Path) -> Path:
    return serve(direct, chosen, out, backbone=digits_backbone(), timeouts=QUICK)


def server(out: Path) -> Any:
    return load_file(out / FOLDER / "server.safetensors")


@pytest.mark.slow
def test_a_run_is_the_one_in_one_process_and_leaves_no_secrets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = masked(rounds=1)
    near = ft.run(chosen, tmp_path / "near", data=DIGITS, backbone=digits_backbone()).path
    direct = grid(chosen, tmp_path / "clients")
    out = far(direct, chosen, tmp_path / "far")
    assert history(near) == history(out)
    assert same_bits(server(near), server(out))
    plain = experiment("fedbn", rounds=1, cohort={"size": 4, "above_norm": "keep"})
    in_clear = ft.run(plain, tmp_path / "plain", data=DIGITS, backbone=digits_backbone()).path
    for name, value in server(in_clear).items():
        assert float((value - server(out)[name]).abs().max()) < 1e-6
    kept = sorted(tmp_path.glob("clients/**/masks-*.json"))
    assert kept
    assert all(json.loads(read_json(path)["kept"])["held"] is None for path in kept)
    assert oct((tmp_path / "clients/node-0/signing.key").stat().st_mode)[-3:] == "600"
    Site(chosen, tmp_path / "clients/node-0", data=DIGITS).load()  # as the site says it
    key = re.findall("the clients here sign with ([0-9a-f]{64})", capsys.readouterr().err)[-1]
    (heard,) = tmp_path.glob("clients/node-1/*/signers.json")
    assert key in read_json(heard)["signers"].values()


@pytest.mark.slow
def test_a_site_that_dies_after_its_upload_counts_and_one_that_dies_before_does_not(
    tmp_path: Path,
) -> None:
    chosen = masked(rounds=1, cohort={"size": 5}, evaluate={"global_model": False})
    runs = {}
    for name, kind, node in (("after", "sign_list", 104), ("before", "train", 103)):

        def dies(message: Message, reply: Message, kind: str = kind, node: int = node) -> Message:
            if message.metadata.message_type == MessageType.QUERY:
                return reply
            order, _ = unpack(message.content, RoundRequest, ANY)
            dead = message.metadata.dst_node_id == node and order.kind in (kind, "reveal")
            return Message(Error(9, "it was killed"), reply_to=message) if dead else reply

        direct = grid(chosen, tmp_path / f"{name}-clients", nodes=5)
        direct.change = dies
        runs[name] = far(direct, chosen, tmp_path / name)
    whole = far(grid(chosen, tmp_path / "w", nodes=5), chosen, tmp_path / "whole")
    assert same_bits(server(runs["after"]), server(whole))
    assert history(runs["before"])[0]["cohort"] == [0, 1, 2, 4]
    assert not same_bits(server(runs["before"]), server(whole))


def test_a_site_tells_nothing_to_a_server_that_leaves_the_protocol(tmp_path: Path) -> None:
    chosen = masked(rounds=1, evaluate={"global_model": False})
    direct = grid(chosen, tmp_path / "clients", nodes=1)
    far(direct, chosen, tmp_path / "far")
    sent = next(one for one in direct.sent if one.metadata.message_type == MessageType.TRAIN)
    train, payloads = unpack(sent.content, RoundRequest, ANY)

    def refused(order: RoundRequest) -> str:
        direct.push_messages([Message(pack(order, payloads), 100, MessageType.TRAIN)])
        reply, sent = unpack(direct.answered[-1].content, RoundReply, ANY)
        assert not sent
        return str(reply.results[0].error)

    bare = tuple(replace(one, order=None) for one in train.requests)
    assert "values without masks" in refused(replace(train, requests=bare))
    assert "not of this experiment" in refused(replace(train, masking=None))
    assert "no secrets are kept of this round" in refused(train)
    assert "a round that was begun before" in refused(replace(train, kind="keys"))

    told = train.masking
    assert told is not None
    for few in (told.clients[:2], told.clients[:3]):  # of whom three must stay
        smaller = replace(told, attempt=told.attempt + 1, clients=few)
        said = f"a round of {len(few)} clients, and this site's experiment draws 4"
        assert said in refused(replace(train, kind="keys", masking=smaller))


def test_a_site_keeps_to_itself_how_far_a_value_is_beyond_the_range(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = masked(rounds=1, secure_aggregation={"threshold": 0.6, "range": 1e-6})
    direct = grid(chosen, tmp_path / "clients", nodes=1)
    with pytest.raises(ft.InputError, match="0 of 4 clients sent a usable update"):
        far(direct, chosen, tmp_path / "far")
    reply, _ = unpack(direct.answered[-1].content, RoundReply, ANY)
    told = "a value is beyond secure_aggregation.range = 1e-06, and a larger range needs a new run"
    assert [one.error for one in reply.results] == 4 * [told]
    shown = capsys.readouterr().err
    assert len(re.findall(rf"fedtailor: client \d: its update has values .*: {told}", shown)) == 4


@pytest.mark.slow
def test_sites_add_noise_of_their_own_to_as_many_updates_as_their_account_has(
    tmp_path: Path,
) -> None:
    spent = {"noise": 1.0, "clip": 0.1, "noise_by": "clients"}
    chosen = masked(rounds=1, cohort={"size": 5}, privacy=spent)
    near = ft.run(chosen, tmp_path / "near", data=DIGITS, backbone=digits_backbone()).path
    direct = grid(chosen, tmp_path / "clients", nodes=1)
    out = far(direct, chosen, tmp_path / "far")
    assert history(out)[0]["epsilon"] == history(near)[0]["epsilon"]
    differ = flat(server(near)).double() - flat(server(out)).double()
    # three must stay; without one's own part there is enough, and five are there, in two runs
    expected = 0.1 / 5 * (2 * 5 / 2) ** 0.5
    assert float(differ.std()) == pytest.approx(expected, rel=4 / (2 * len(differ)) ** 0.5)

    orders = [unpack(m.content, RoundRequest, ANY)[0] for m in direct.sent
              if m.metadata.message_type == MessageType.EVALUATE]  # fmt: skip
    keys = next(one for one in orders if one.kind == "keys")
    assert keys.masking is not None
    later = replace(keys, masking=replace(keys.masking, attempt=keys.masking.attempt + 1))
    direct.push_messages([Message(pack(later, [{}]), 100, MessageType.EVALUATE)])
    reply, _ = unpack(direct.answered[-1].content, RoundReply, ANY)
    masking = reply.results[0].masking
    assert masking is not None
    assert (masking.spent, masking.keys) == (True, None)


@pytest.mark.slow
def test_a_run_ends_although_a_round_with_the_sites_noise_ran_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spent = {"noise": 1.0, "clip": 0.1, "noise_by": "clients"}
    chosen = masked(rounds=2, cohort={"size": 5}, privacy=spent)
    direct = grid(chosen, tmp_path / "clients", nodes=1)

    class StopError(Exception):
        pass

    def stop(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == MessageType.TRAIN:
            raise StopError
        return reply

    direct.change = stop
    with pytest.raises(StopError):
        far(direct, chosen, tmp_path / "far")
    out = far(grid(chosen, tmp_path / "clients", nodes=1), chosen, tmp_path / "far")
    assert [len(one["cohort"]) for one in history(out)] == [5, 0]
    told = "the accounts of 5 clients have no update left; the server's state stays as it is"
    assert told in capsys.readouterr().err + (out / "run.log").read_text()


def test_files_of_keys_that_are_damaged_are_named(tmp_path: Path) -> None:
    site = Site(masked(), tmp_path, data=DIGITS)
    for name, content, said in (
        ("signing.key", "abc", "signing.key is damaged: restore it from a copy"),
        ("signers.json", '{"0": "00"}', r"must be \{\"signers\": \{\"0\": .*64 hexadecimal digits"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(ft.InputError, match=said):
            site.load()


@pytest.mark.slow
def test_another_signing_key_of_a_client_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = masked(rounds=1, cohort={"size": 5})
    (tmp_path / "clients/node-0").mkdir(parents=True)
    write_json(tmp_path / "clients/node-0/signers.json", {"signers": {"1": "00" * 32}})
    with pytest.raises(ft.InputError, match="shares of 2 of 5 clients are there; 3 must stay; the"):
        far(grid(chosen, tmp_path / "clients"), chosen, tmp_path / "far")
    assert "client 1 signs with another key than before" in capsys.readouterr().err


@pytest.mark.slow
def test_weights_by_the_mean_are_the_same_and_the_sites_keep_no_update(tmp_path: Path) -> None:
    options = {"rounds": 1, "cohort": {"size": 4}, "secure_aggregation": {"threshold": 0.6}}
    chosen = experiment("fedsdg", **options)
    near = ft.run(chosen, tmp_path / "near", data=DIGITS, backbone=digits_backbone()).path
    out = far(grid(chosen, tmp_path / "clients"), chosen, tmp_path / "far")
    one, other = (load_file(p / "methods/fedsdg/seed-0/server.safetensors") for p in (near, out))
    assert same_bits(one, other)
    assert history(near, "fedsdg") == history(out, "fedsdg")
    costs = [read_json(p / "methods/fedsdg/seed-0/costs.json") for p in (near, out)]
    assert costs[0] | {"flops": None} == costs[1]
    assert not list(tmp_path.glob("clients/**/update.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [True, False])
def test_a_round_that_was_stopped_before_its_evaluation_is_not_trained_again(
    hidden: bool, tmp_path: Path
) -> None:
    """With other clients its difference to the first would be one client's update."""
    options: dict[str, Any] = {"rounds": 2, "cohort": {"size": 5}, "evaluate": {"every": 1}}
    privacy = {"noise": 1.0, "clip": 0.1, "clip_quantile": 0.5}
    more = {"secure_aggregation": {"threshold": 0.6}} if hidden else {"privacy": privacy}
    chosen = experiment("fedper", **options, **more)
    trained, sent = list[int](), list[torch.Tensor]()

    class Stopped(Exception):  # noqa: N818
        pass

    def run(name: str, out: Path, *, stops: bool, away: bool) -> Path:
        direct = grid(chosen, tmp_path / name, nodes=5, model=backbone)

        def change(message: Message, reply: Message) -> Message:
            if message.metadata.message_type == MessageType.QUERY:
                return reply
            order, payloads = unpack(message.content, RoundRequest, ANY)
            if order.round == 1 and order.kind == "personal":
                sent.append(flat(payloads[0]))
                if stops:
                    raise Stopped
            if order.round == 1 and order.kind == "train":
                trained.append(message.metadata.dst_node_id)
                if away and message.metadata.dst_node_id == 104:
                    return Message(Error(9, "away"), reply_to=message)
            return reply

        direct.change = change
        return serve(direct, chosen, out, backbone=backbone(), timeouts=QUICK)

    with pytest.raises(Stopped):
        run("sites", tmp_path / "out", stops=True, away=False)
    out = run("sites", tmp_path / "out", stops=False, away=True)
    assert sorted(trained) == [100, 101, 102, 103, 104]
    assert all(torch.equal(one, sent[0]) for one in sent)  # to each site, before and after
    assert [line["cohort"] for line in history(out, "fedper")] == [[0, 1, 2, 3, 4]] * 2
    assert not [*out.rglob("*-aggregated.safetensors")]
    if hidden:  # noise follows from a secret of each run's own
        whole = run("others", tmp_path / "whole", stops=False, away=False)
        assert history(out, "fedper") == history(whole, "fedper")
        states = [one / "methods/fedper/seed-0/server.safetensors" for one in (out, whole)]
        assert same_bits(*map(load_file, states))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["keys", "train", "sign_list"])
def test_where_too_few_are_left_a_run_stops_but_once_the_values_are_there(
    kind: str, tmp_path: Path
) -> None:
    chosen = masked(secure_aggregation={"threshold": 1.0}, evaluate={"every": 2})

    def leaves(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == MessageType.QUERY:
            return reply
        order, _ = unpack(message.content, RoundRequest, ANY)
        gone = message.metadata.dst_node_id == 103 and (order.kind, order.round) == (kind, 1)
        return Message(Error(9, "away"), reply_to=message) if gone else reply

    direct = grid(chosen, tmp_path / "clients", nodes=5)
    direct.change = leaves
    if kind == "sign_list":
        out = far(direct, chosen, tmp_path / "far")
        assert [len(line["cohort"]) for line in history(out)] == [0, 4]
        return
    with pytest.raises(InputError, match="; the same command goes on after round 0"):
        far(direct, chosen, tmp_path / "far")


@pytest.mark.slow
def test_a_client_goes_on_from_the_round_before_one_that_came_to_nothing(tmp_path: Path) -> None:
    """A server that is stopped in the round after asks for the same as one that is not."""
    options: dict[str, Any] = {"rounds": 2, "cohort": {"size": 5}, "evaluate": {"every": 2}}
    chosen = experiment("fedper", secure_aggregation={"threshold": 0.6}, **options)
    bases = list[tuple[int, ...]]()

    class Stopped(Exception):  # noqa: N818
        pass

    def run(*, stops: bool) -> Path:
        direct = grid(chosen, tmp_path / "sites", nodes=1, model=backbone)

        def change(message: Message, reply: Message) -> Message:
            if message.metadata.message_type == MessageType.QUERY:
                return reply
            order, _ = unpack(message.content, RoundRequest, ANY)
            if order.round == 1 and order.kind == "reveal":
                return Message(Error(9, "away"), reply_to=message)
            if order.round == 2 and order.kind == "train":
                bases.append(tuple(one.base for one in order.requests))
                if stops:
                    raise Stopped
            return reply

        direct.change = change
        return serve(direct, chosen, tmp_path / "out", backbone=backbone(), timeouts=QUICK)

    with pytest.raises(Stopped):
        run(stops=True)
    out = run(stops=False)
    assert bases == [(0, 0, 0, 0, 0)] * 2
    assert [line["cohort"] for line in history(out, "fedper")] == [[], [0, 1, 2, 3, 4]]


def test_a_client_tells_no_shares_for_another_sum_of_a_round(tmp_path: Path) -> None:
    clients = (0, 1, 2)
    config = SecureAggregationConfig(0.6)
    weighing = Weighing(lambda client: 10, lambda own, total, count: own / total)
    sites = {
        client: SiteMasks(
            config,
            tmp_path / f"{client}",
            tmp_path / f"{client}/run/a/seed-0",
            weighing,
            math.inf,
            3,
            False,
        )
        for client in clients
    }
    for site in sites.values():
        site.folder.mkdir(parents=True)

    def summed(
        attempt: int, number: int, there: tuple[int, ...], sign: Any = None, tell: Any = None
    ) -> set[int]:
        """Of how many clients each tells shares, where some alone are asked to."""

        def asked(kind: Any, told: Masking, some: tuple[int, ...] = clients) -> dict[int, Any]:
            message = RoundRequest("x", "0" * 32, "a", 0, number, kind, (), (), told)
            return {client: sites[client].step(message, client) for client in some}

        told = Masking(attempt, clients)
        keys = asked("keys", told)
        told = replace(told, signers=tuple((k, keys[k].signer) for k in clients))
        shares = asked("share", replace(told, share=tuple(keys[k].keys for k in clients)))
        message = RoundRequest("x", "0" * 32, "a", 0, number, "train", (), (), told)
        for client in clients:
            own = tuple((k, t) for k in clients for to, t in shares[k].share if to == client)
            sites[client].step(message, client, Order(30, 3, own))
        signed = asked("sign_list", replace(told, sign_list=there), sign or there)
        lists = tuple((k, one.sign_list) for k, one in signed.items())
        revealed = asked("reveal", replace(told, reveal=lists), tell or there)
        return {len(one.reveal) for one in revealed.values()}

    assert summed(1, 1, clients) == {3}
    assert summed(2, 1, clients) == {3}  # the same sum again, after a stop
    with pytest.raises(InputError, match="another list of clients was signed in round 1:"):
        summed(3, 1, (0, 1))
    assert summed(4, 2, (0, 1)) == {3}
    with pytest.raises(InputError, match="another list of clients was signed in round 2"):
        summed(5, 1, clients)
    assert summed(6, 3, clients, tell=(1, 2)) == {3}  # enough for a sum, without client 0
    with pytest.raises(InputError, match="another list of clients was signed in round 3"):
        summed(7, 3, (0, 1), sign=(0,))
