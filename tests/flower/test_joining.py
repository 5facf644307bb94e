"""A new client at a site of its own joins a run over Flower that has ended."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from flwr.app import Message
from safetensors.torch import load_file

from fedtailor.flower import client_app, serve
from fedtailor.flower.codec import pack, unpack
from fedtailor.flower.messages import RoundReply
from fedtailor.inference.onboard import onboard
from fedtailor.runs.experiment import Experiment
from fedtailor.runs.trained import open_trained
from fedtailor.store.committed import read_commit
from fedtailor.store.files import read_json
from tests.flower.grid import ANY, DirectGrid
from tests.flower.hostile import WILD
from tests.flower.test_sites import QUICK, bert, experiment, news, three_sites, with_data, write
from tests.small import same_bits
from tests.test_models_out import digests

NEW = range(4, 5)


def add_new_site(grid: DirectGrid, chosen: Experiment, folder: Path) -> str:
    path = write(folder / "new.csv", news(24, 3))
    app = client_app(
        with_data(chosen, path, client=None), str(folder / "new"), clients=NEW, backbone=bert()
    )
    grid.apps[200] = app, {}
    return path


@pytest.mark.parametrize("method", ["fedsdg", "fedmerge"])
@pytest.mark.slow
def test_a_new_site_joins_a_run_that_has_ended(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = experiment(method, data={"max_length": 16})
    grid = three_sites(chosen, tmp_path)
    out = serve(grid, chosen, tmp_path / "run", backbone=bert(), timeouts=QUICK)
    before = digests(out)
    path = add_new_site(grid, chosen, tmp_path)
    serve(grid, chosen, out, backbone=bert(), timeouts=QUICK)  # new sites are no part of it
    assert digests(out) == before

    del grid.apps[0]  # one of the others is away
    asked = len(grid.sent)
    serve(grid, chosen, out, backbone=bert(), timeouts=QUICK, new_clients=NEW)
    assert {m.metadata.dst_node_id for m in grid.sent[asked:] if m.metadata.group_id == "join"} == {
        200
    }
    told = capsys.readouterr()
    assert "client 4 has joined; it keeps" in told.err
    assert f"client-4 (client 4) joins {method}, seed 0: 17 train, 2 validation, 5" in told.out
    now = digests(out)
    joined = f"methods/{method}/seed-0/joined.json"
    assert now.keys() - before.keys() == {joined}
    assert {name: value for name, value in now.items() if name != joined} == before
    assert json.loads((out / joined).read_text())["clients"] == [4]

    (model,) = (tmp_path / "new").glob(f"*/{method}/seed-0/client-4/model.safetensors")
    result = json.loads((model.parent / "result.json").read_text())
    near = onboard_here(out, method, path)
    assert (result["scores"], result["round"]) == (near["scores"], near["round"])
    trained = open_trained(out, method, backbone=bert())
    assert same_bits(load_file(model), trained.client_state("lagos"))


def onboard_here(out: Path, method: str, path: str) -> dict[str, object]:
    """The same client, in one process with the server's state."""
    onboard(out, method, path, "lagos", backbone=bert())
    text = (out / f"methods/{method}/seed-0/onboarded/lagos/result.json").read_text()
    content: dict[str, object] = json.loads(text)
    return content


@pytest.mark.slow
def test_a_new_site_that_is_away_is_asked_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = experiment()
    grid = three_sites(chosen, tmp_path)
    out = serve(grid, chosen, tmp_path / "run", backbone=bert(), timeouts=QUICK)
    hurried = replace(QUICK, start=0.1)
    serve(grid, chosen, out, backbone=bert(), timeouts=hurried, new_clients=NEW)
    assert "no node serves the new client 4" in capsys.readouterr().err
    add_new_site(grid, chosen, tmp_path)
    serve(grid, chosen, out, backbone=bert(), timeouts=QUICK, new_clients=NEW)
    assert "client 4 has joined" in capsys.readouterr().err
    joined = (out / "methods/fedsdg/seed-0/joined.json").read_text()
    assert json.loads(joined)["clients"] == [4]


@pytest.mark.slow
def test_rounds_that_were_added_are_run_before_a_new_site_joins(tmp_path: Path) -> None:
    first = experiment(rounds=1)
    grid = three_sites(first, tmp_path)
    out = serve(grid, first, tmp_path / "run", backbone=bert(), timeouts=QUICK)
    longer = replace(first, rounds=2)
    grid = three_sites(longer, tmp_path)
    add_new_site(grid, longer, tmp_path)
    serve(grid, longer, out, backbone=bert(), timeouts=QUICK, new_clients=NEW)
    folder = out / "methods/fedsdg/seed-0"
    assert json.loads((folder / "commit.json").read_text())["round"] == 2
    joined = {"round": read_commit(folder).best_round, "clients": [4]}
    assert read_json(folder / "joined.json") == joined
    before = {"round": joined["round"] + 1, "clients": [4]}  # as it was when another was reported
    (folder / "joined.json").write_text(json.dumps(before))
    serve(grid, longer, out, backbone=bert(), timeouts=QUICK, new_clients=NEW)
    assert read_json(folder / "joined.json") == joined


@pytest.mark.slow
def test_a_new_client_stays_with_the_node_that_was_there_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = experiment()
    grid = three_sites(chosen, tmp_path)
    out = serve(grid, chosen, tmp_path / "run", backbone=bert(), timeouts=QUICK)
    add_new_site(grid, chosen, tmp_path)
    grid.apps[201] = grid.apps[200]  # says that it serves the same client
    asked = len(grid.sent)
    serve(grid, chosen, out, backbone=bert(), timeouts=QUICK, new_clients=NEW)
    assert [m.metadata.dst_node_id for m in grid.sent[asked:] if m.metadata.group_id == "join"] == [
        200
    ]
    told = capsys.readouterr().err
    assert told.count("node 201: new client 4 is served by another node, too") == 1


@pytest.mark.slow
def test_words_of_a_new_site_fill_no_log_and_control_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = experiment(rounds=1)
    grid = three_sites(chosen, tmp_path)
    out = serve(grid, chosen, tmp_path / "run", backbone=bert(), timeouts=QUICK)
    add_new_site(grid, chosen, tmp_path)

    def change(message: Message, reply: Message) -> Message:
        if message.metadata.group_id == "join":
            sent, _ = unpack(reply.content, RoundReply, ANY)
            results = tuple(replace(one, kept=None, error=WILD) for one in sent.results)
            reply.content = pack(replace(sent, results=results))
        return reply

    grid.change = change
    capsys.readouterr()
    serve(grid, chosen, out, backbone=bert(), timeouts=QUICK, new_clients=NEW)
    told = capsys.readouterr().err.splitlines()
    assert any("new client 4: ?[2J?]0;owned" in line for line in told)
    for line in told:
        assert line.isprintable()
        assert len(line) < 600
    assert not (out / "methods/fedsdg/seed-0/joined.json").exists()
