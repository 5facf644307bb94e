"""What goes wrong between server and clients, and what then becomes of a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from flwr.app import Message, MessageType
from safetensors.torch import load_file

import fedtailor as ft
from fedtailor.advice.advise import clients_of_run
from fedtailor.errors import DivergedError, InputError
from fedtailor.flower import serve
from fedtailor.flower.codec import pack, unpack
from fedtailor.flower.messages import NodeInfo, RoundReply, RoundRequest
from fedtailor.report.table import table
from fedtailor.runs.trained import open_trained
from fedtailor.store.client_states import SEEN
from fedtailor.store.committed import read_commit
from fedtailor.store.format import seal_json
from fedtailor.store.read import read_all
from tests.flower.grid import ANY, DIGITS, QUICK, experiment, grid, orders
from tests.runs.test_trained import METHODS, WILD
from tests.runs.test_trained import experiment as at_its_best_before_the_end
from tests.small import digits_backbone, private_rows, same_bits


@pytest.mark.slow
def test_a_killed_run_ends_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    chosen = experiment("fedper")
    near = ft.run(chosen, tmp_path / "near", data=DIGITS, backbone=digits_backbone()).path
    whole = load_file(near / "methods/fedper/seed-0/server.safetensors")

    def kill(message: Message, reply: Message) -> Message:
        if message.metadata.group_id == "2" and message.metadata.dst_node_id == 101:
            raise KeyboardInterrupt  # its clients have trained, and wait to hear what counted
        return reply

    direct = grid(chosen, tmp_path / "clients")
    direct.change = kill
    given = {"backbone": digits_backbone(), "timeouts": QUICK}
    with pytest.raises(KeyboardInterrupt):
        serve(direct, chosen, tmp_path / "far", **given)
    assert len(list((tmp_path / "clients").rglob("round-000002.safetensors"))) > 0
    again = grid(chosen, tmp_path / "clients")
    far = serve(again, chosen, tmp_path / "far", **given)
    folder = far / "methods/fedper/seed-0"
    assert same_bits(load_file(folder / "server.safetensors"), whole)
    assert not orders(again, 1)
    serve(again, chosen, far, **given)  # finished: nothing more is asked
    assert len(orders(again, 3)) <= 2
    assert "fedper" in ft.compare([far])
    ft.write_report([far], tmp_path / "report.html")


def test_too_few_replies_stop_the_run(tmp_path: Path) -> None:
    chosen = experiment("fedavg", rounds=1, cohort={})
    direct = grid(chosen, tmp_path / "clients", nodes=5)

    def late(message: Message, reply: Message) -> Message | None:
        lost = message.metadata.dst_node_id == 103 and message.metadata.group_id == "1"
        return None if lost else reply

    direct.change = late
    given = {"backbone": digits_backbone(), "timeouts": replace(QUICK, least=1.0)}
    with pytest.raises(InputError, match="4 of 5 clients sent a usable update, 5 are needed; the"):
        serve(direct, chosen, tmp_path / "out", **given)


@pytest.mark.slow
def test_a_method_that_diverges_ends_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wild = {"optimiser": {"lr": 1e6, "weight_decay": 1e6}}
    small = {"rounds": 1, "cohort": {}, "local": {"batch_size": 2}}
    chosen = experiment("", **small, methods={"fedavg": wild, "fedper": {}})
    direct = grid(chosen, tmp_path / "clients")
    given = {"backbone": digits_backbone(), "timeouts": QUICK}
    out = serve(direct, chosen, tmp_path / "out", **given)
    ends = {method: json.loads((out / "methods" / method / "seed-0/commit.json").read_text())
            for method in ("fedavg", "fedper")}  # fmt: skip
    assert "in round 1 of fedavg; lower the learning rate" in ends["fedavg"]["diverged"]
    assert ends["fedper"]["finished"]
    assert "fedavg, seed 0 ends here: " in capsys.readouterr().err
    alone = experiment("fedavg", wild, **small)
    for _ in range(2):  # the second time it goes on, and ends there again
        with pytest.raises(DivergedError, match="in round 1 of fedavg"):
            serve(grid(alone, tmp_path / "others"), alone, tmp_path / "alone", **given)


@pytest.mark.slow
def test_a_run_that_diverged_goes_on_after_its_last_good_round(tmp_path: Path) -> None:
    chosen = experiment("fedper")
    near = ft.run(chosen, tmp_path / "near", data=DIGITS, backbone=digits_backbone()).path
    given = {"backbone": digits_backbone(), "timeouts": replace(QUICK, least=1.0)}

    def spoil(message: Message, reply: Message) -> Message:
        train = message.metadata.message_type == MessageType.TRAIN
        if train and message.metadata.group_id == "2":
            report, sent = unpack(reply.content, RoundReply, ANY)
            gone = [replace(r, error="its loss is nan", diverged=True) for r in report.results]
            reply.content = pack(replace(report, results=tuple(gone)), sent)
        return reply

    direct = grid(chosen, tmp_path / "clients")
    direct.change = spoil
    with pytest.raises(DivergedError, match="its loss is nan in round 2 of fedper"):
        serve(direct, chosen, tmp_path / "far", **given)
    assert read_commit(tmp_path / "far/methods/fedper/seed-0").diverged
    far = serve(grid(chosen, tmp_path / "clients"), chosen, tmp_path / "far", **given)
    part = "methods/fedper/seed-0"
    assert read_commit(far / part).finished
    assert read_commit(far / part).diverged is None
    for name in ("history.jsonl", "server.safetensors"):
        assert (far / part / name).read_bytes() == (near / part / name).read_bytes(), name


@pytest.mark.slow
def test_every_client_gets_its_model_in_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that are not evaluated, and those that come back only when the run is finished."""
    chosen = experiment("fedper", evaluate={"every": 3, "clients": 2})
    direct = grid(chosen, tmp_path / "clients")
    away = direct.apps[101]

    def leave(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == MessageType.EVALUATE:
            direct.apps.pop(101, None)
        return reply

    direct.change = leave
    given = {"backbone": digits_backbone(), "timeouts": QUICK}
    out = serve(direct, chosen, tmp_path / "out", **given)
    logs = [(out / "methods/fedper/seed-0" / f"{log}.jsonl").read_bytes()
            for log in ("history", "clients")]  # fmt: skip
    assert "without a model of their own: clients 1, 3; the same" in capsys.readouterr().err
    direct.apps[101] = away
    direct.change = lambda message, reply: reply
    serve(direct, chosen, out, **given)
    asked = len(direct.sent)
    serve(direct, chosen, out, **given)
    assert len(direct.sent) == asked + 2  # who is there; nothing more
    assert logs == [(out / "methods/fedper/seed-0" / f"{log}.jsonl").read_bytes()
                    for log in ("history", "clients")]  # fmt: skip
    near = ft.run(chosen, tmp_path / "near", data=DIGITS, backbone=digits_backbone()).path
    rows = private_rows(near / "methods/fedper/seed-0/private.safetensors")
    trained = rows.pop(SEEN)
    for client in range(5):
        (path,) = (tmp_path / "clients").rglob(f"client-{client}/model.safetensors")
        model = load_file(path)
        own = {name: value[client] for name, value in rows.items() if trained[client]}
        assert same_bits({name: model[name] for name in own}, own)
        assert model.keys() > rows.keys()


@pytest.mark.slow
@pytest.mark.parametrize("label", ["fedper", "fedavg-ft"])
def test_sites_keep_the_models_of_the_reported_round(label: str, tmp_path: Path) -> None:
    """Also where the server and the sites are restarted, and rounds repeated."""
    chosen = at_its_best_before_the_end({label: METHODS[label]})
    near = ft.run(chosen, tmp_path / "near", data=DIGITS, backbone=digits_backbone()).path
    trained = open_trained(near, label, data=DIGITS, backbone=digits_backbone())
    assert trained.round < 6

    def killed_in(number: int) -> None:
        def kill(message: Message, reply: Message) -> Message:
            if message.metadata.group_id == str(number):
                raise KeyboardInterrupt
            return reply

        direct = grid(chosen, tmp_path / "clients")
        direct.change = kill
        with pytest.raises(KeyboardInterrupt):
            serve(direct, chosen, tmp_path / "far", **given)

    given = {"backbone": digits_backbone(), "timeouts": QUICK}
    for number in (trained.round, trained.round + 1, 6):
        killed_in(number)
    serve(grid(chosen, tmp_path / "clients"), chosen, tmp_path / "far", **given)
    for client in range(5):
        (path,) = (tmp_path / "clients").rglob(f"client-{client}/model.safetensors")
        assert same_bits(load_file(path), trained.client_state(client))
        assert len(list(path.parent.iterdir())) <= 4


@pytest.mark.slow
def test_rounds_are_added_where_all_sides_have_the_longer_experiment(tmp_path: Path) -> None:
    short, long = (experiment("fedper", rounds=rounds, evaluate={"every": 1}) for rounds in (2, 3))
    near = ft.run(long, tmp_path / "near", data=DIGITS, backbone=digits_backbone()).path
    given = {"backbone": digits_backbone(), "timeouts": QUICK}
    for chosen in (short, long):
        far = serve(grid(chosen, tmp_path / "clients"), chosen, tmp_path / "far", **given)
    part = "methods/fedper/seed-0"
    for name in ("history.jsonl", "clients.jsonl", "server.safetensors"):
        assert (far / part / name).read_bytes() == (near / part / name).read_bytes(), name
    with pytest.raises(InputError, match="predict and export at its site"):
        open_trained(far, "fedper", data=DIGITS, backbone=digits_backbone()).client_state(0)
    (verdict,) = table(read_all([far])).verdicts
    assert (verdict.best, verdict.next_step) == ("fedper", "")
    elsewhere = replace(long, start_from=ft.StartConfig(str(near)))
    with pytest.raises(InputError, match=r"start_from = .* is for runs in one process"):
        serve(grid(elsewhere, tmp_path / "others"), elsewhere, tmp_path / "out", **given)


@pytest.mark.slow
def test_sites_keep_the_models_of_a_method_that_diverged(tmp_path: Path) -> None:
    chosen = at_its_best_before_the_end({"fedper": WILD, "fedavg": {}})
    near = ft.run(chosen, tmp_path / "near", data=DIGITS, backbone=digits_backbone())
    trained = open_trained(near, "fedper", data=DIGITS, backbone=digits_backbone())
    given = {"backbone": digits_backbone(), "timeouts": replace(QUICK, least=1.0)}
    far = serve(grid(chosen, tmp_path / "clients"), chosen, tmp_path / "far", **given)
    commit = read_commit(far / "methods/fedper/seed-0")
    assert commit.diverged
    assert commit.best == trained.commit.best
    for client in range(5):
        (path,) = (tmp_path / "clients").rglob(f"fedper/seed-0/client-{client}/model.safetensors")
        assert same_bits(load_file(path), trained.client_state(client))


def test_both_sides_must_have_the_same_experiment(tmp_path: Path) -> None:
    direct = grid(experiment("fedavg"), tmp_path / "clients", nodes=1)
    given = {"backbone": digits_backbone(), "timeouts": QUICK}
    with pytest.raises(InputError, match="node 100: the server's experiment is not the one at"):
        serve(direct, experiment("fedper"), tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()
    assert len(direct.sent) == 1  # a node that refused is left alone for a while


@pytest.mark.slow
def test_sites_that_tell_their_labels_get_advice_that_counts_them(tmp_path: Path) -> None:
    chosen = experiment("fedper", rounds=1)
    near = ft.run(chosen, tmp_path / "near", data=DIGITS, backbone=digits_backbone()).path
    given = {"backbone": digits_backbone(), "timeouts": QUICK}
    told = grid(chosen, tmp_path / "clients", tell_labels=True)
    runs = [near, serve(told, chosen, tmp_path / "told", **given)]
    runs.append(serve(grid(chosen, tmp_path / "silent"), chosen, tmp_path / "untold", **given))
    here, far, untold = map(clients_of_run, runs)
    assert far == here
    assert far.label_overlap is not None
    assert replace(far, label_overlap=None) == untold

    def lie(message: Message, reply: Message) -> Message:
        if message.metadata.message_type == MessageType.QUERY:
            info, _ = unpack(reply.content, NodeInfo, ANY)
            wrong = [replace(sizes, labels=((-1,),) * len(info.clients)) for sizes in info.sizes]
            reply.content = pack(replace(info, sizes=tuple(wrong)))
        return reply

    told.change = lie
    with pytest.raises(InputError, match="its labels for seed 0 don't fit its sizes"):
        serve(told, chosen, tmp_path / "lied", **given)


@pytest.mark.slow
def test_a_federation_that_was_spoiled_goes_back_and_ends_as_if_it_had_not_been(
    tmp_path: Path,
) -> None:
    """The sites keep the states of the best round; those of spoiled rounds are not used."""
    sizes = {"clients": 3, "scheme": "dirichlet", "min_examples": 6, "max_examples": 60}
    more = {"rounds": 8, "cohort": {}, "split": sizes, "evaluate": {"every": 1}}
    chosen = experiment("fedper", {"optimiser": {"name": "adam", "lr": 0.01}}, **more)
    near = ft.run(chosen, tmp_path / "near", data=DIGITS, backbone=digits_backbone()).path
    given = {"backbone": digits_backbone(), "timeouts": replace(QUICK, least=0.5)}

    def boost(message: Message, reply: Message) -> Message:
        about = message.metadata
        if about.message_type == MessageType.TRAIN and int(about.group_id) > 4:
            (received,) = unpack(message.content, RoundRequest, ANY)[1]
            report, sent = unpack(reply.content, RoundReply, ANY)
            if sent and about.dst_node_id == 102:
                far = {
                    k: received[k] - 900 * (v - received[k])
                    for k, v in sent[0].items()
                    if "running" not in k
                }
                reply.content = pack(report, [{**sent[0], **far}])
        return reply

    direct = grid(chosen, tmp_path / "clients", nodes=3)
    direct.change = boost
    serve(direct, chosen, tmp_path / "far", **given)
    part = "methods/fedper/seed-0"
    spoiled = read_commit(tmp_path / "far" / part)
    said = ft.rollback(tmp_path / "far", "fedper")
    assert spoiled.best_round <= 4 < spoiled.round
    assert said[0].endswith(f"from round {spoiled.round} to round {spoiled.best_round}")
    assert "client 2, from round 5 on, sent updates of up to" in said[2]
    path = tmp_path / "far" / part / "flower.json"
    names = path.read_bytes()
    path.write_bytes(seal_json({"run": "0" * 32, "before": ["1" * 32]}))
    with pytest.raises(InputError, match=r"flower.json is damaged: before and up_to must have one"):
        serve(grid(chosen, tmp_path / "clients", nodes=3), chosen, tmp_path / "far", **given)
    path.write_bytes(names)
    far = serve(grid(chosen, tmp_path / "clients", nodes=3), chosen, tmp_path / "far", **given)
    for name in ("history.jsonl", "server.safetensors"):
        assert (far / part / name).read_bytes() == (near / part / name).read_bytes(), name
