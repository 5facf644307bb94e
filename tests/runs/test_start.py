"""A run that goes on from a finished one, with other data or other clients."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor.data.federation import Federation
from fedtailor.engine.prepare import memory_states
from fedtailor.inference.onboard import onboard
from fedtailor.runs.build import Inputs, federation_of
from fedtailor.runs.experiment import Experiment, load, parse
from fedtailor.runs.run import dry_run
from fedtailor.runs.start import open_start
from fedtailor.runs.trained import open_trained
from fedtailor.store.read import read
from fedtailor.trackers.follow import track
from fedtailor.trackers.trial import TrackedTrial, Values, trials
from tests.forked import contents
from tests.small import digits, digits_backbone, without_checksum

FOLDER = Path("methods/fedsdg/seed-0")
OLD = Experiment(
    methods={"fedsdg": ft.FedSDG(rank=2, optimiser=ft.Optimiser("adam", lr=0.02))},
    rounds=2,
    split=ft.SplitConfig(scheme="natural", validation=0.3),
    local=ft.LocalConfig(steps=10),
)


def sites(*names: str) -> Any:
    """The digits, divided among sites: each has every n-th one of three hundred rows."""
    rows = np.arange(300)
    whole = digits()
    return replace(
        whole,
        inputs=replace(whole.inputs, values=whole.inputs.values[rows]),  # type: ignore[type-var]
        num_train=300,
        labels=whole.labels[rows],  # type: ignore[index]
        groups=rows % len(names),
        client_names=names,
        digest=f"digits of {names}",
    )


def table(rows: range, *names: str) -> Any:
    """Some of the digits, divided among sites."""
    whole, some = digits(), np.array(rows)
    inputs = replace(whole.inputs, values=whole.inputs.values[some])  # type: ignore[type-var]
    labels, groups = whole.labels[some], some % len(names)  # type: ignore[index]
    return replace(
        whole,
        inputs=inputs,
        num_train=len(some),
        labels=labels,
        groups=groups,
        client_names=names,
        digest=f"digits {rows} of {names}",
    )


OLD_SITES, NEW_SITES = sites("bonn", "kiel", "ulm"), sites("kiel", "lagos", "bonn")


def run(experiment: Experiment, out: Path, dataset: Any = NEW_SITES, **options: Any) -> Path:
    return ft.run(experiment, out, data=dataset, backbone=digits_backbone(), **options).path


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(OLD, tmp_path_factory.mktemp("runs") / "old", OLD_SITES)


def going_on(old: Path, **changes: Any) -> Experiment:
    return replace(OLD, **{"start_from": ft.StartConfig(str(old)), **changes})


@pytest.fixture(scope="module")
def new(old: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(going_on(old), tmp_path_factory.mktemp("runs") / "new")


@pytest.mark.slow
def test_round_0_is_the_old_model_on_the_new_rows(old: Path, new: Path) -> None:
    trained = open_trained(old, "fedsdg", data=OLD_SITES, backbone=digits_backbone())
    (trial,) = read(new).trials
    before = {e.split: e for e in trial.evaluations if e.round == 0 and e.model == "personal"}
    federation = open_trained(new, "fedsdg", data=NEW_SITES, backbone=digits_backbone()).federation
    for client, name in enumerate(("kiel", "lagos", "bonn")):
        rows = federation.rows(client, "test")
        if name == "lagos":  # new: the old server's state, and a fresh private one
            private = trained.method.init_client(
                trained.task, client, ft.random.key(0, "client", client)
            )
            state = {**trained.method.send(trained.task, trained.server, 0), **private}
        else:
            state = trained.client_state(name)
        logits = trained.method.predict(trained.task, state, federation.batch(rows))
        right = (logits.argmax(1).numpy() == NEW_SITES.labels[rows]).mean()
        assert before["test"].accuracy[client] == pytest.approx(right)
    assert [record.round for record in trial.history] == [1, 2]
    about = json.loads((new / FOLDER / "start.json").read_text())
    assert about["run"] == str(old)
    assert about["clients"] == 2


@pytest.mark.slow
def test_it_goes_on_from_a_kill_without_the_old_run(old: Path, new: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(old, tmp_path / "old")
    out = tmp_path / "out"
    experiment = going_on(copy, rounds=1)
    run(experiment, out)
    shutil.rmtree(copy)
    run(replace(experiment, rounds=2), out)
    skip = {"experiment.json", str(FOLDER / "start.json")}
    a, b = ({n: v for n, v in contents(one).items() if n not in skip} for one in (out, new))
    assert a == b


@pytest.mark.slow
def test_the_old_model_is_kept_where_training_makes_it_worse(old: Path, tmp_path: Path) -> None:
    harmful = {"fedsdg": ft.FedSDG(rank=2, optimiser=ft.Optimiser("adam", lr=1.0))}
    out = run(going_on(old, methods=harmful, rounds=2), tmp_path / "out")
    trained = open_trained(out, "fedsdg", data=NEW_SITES, backbone=digits_backbone())
    source = open_trained(old, "fedsdg", data=OLD_SITES, backbone=digits_backbone())
    assert trained.round == 0
    for a, b in (("kiel", "kiel"), ("bonn", "bonn")):
        ours, theirs = trained.client_state(a), source.client_state(b)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    text = ft.compare([out])
    assert "- before: the models that the method went on from" in text


@pytest.mark.slow
def test_a_client_that_has_joined_the_old_run_brings_what_it_was_fitted_to(
    old: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(old, tmp_path / "old")
    onboard(copy, "fedsdg", sites("lagos"), "lagos", backbone=digits_backbone())
    joined = open_trained(copy, "fedsdg", backbone=digits_backbone()).client_state("lagos")
    inputs = Inputs.load(going_on(copy), NEW_SITES, digits_backbone())
    start = open_start(inputs, "fedsdg", 0)
    store = memory_states(start.method, start.task, start.federation)
    start.stage(store)
    kept = store.read(1)
    assert kept
    assert all(torch.equal(value, joined[name]) for name, value in kept.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedmerge", "fedalt", "scaffold", "fedhft", "hetlora"])
def test_states_by_client_at_the_server_follow_the_clients(name: str, tmp_path: Path) -> None:
    method = {
        "fedmerge": ft.FedMerge(models=2),
        "fedalt": ft.FedALT(rank=2),
        "scaffold": ft.Scaffold(),
        "fedhft": ft.FedHFT(rank=2, clusters=2, warmup_rounds=1),
        "hetlora": ft.HetLoRA(rank=(1, 2, 4)),
    }[name]
    old = run(replace(OLD, methods={name: method}), tmp_path / "old", OLD_SITES)
    before = open_trained(old, name, data=OLD_SITES, backbone=digits_backbone()).server
    four = sites("kiel", "lagos", "bonn", "rome")
    inputs = Inputs.load(going_on(old, methods={name: method}), four, digits_backbone())
    server = open_start(inputs, name, 0).server()
    by_client = [n for n in before if server[n].shape != before[n].shape]
    for tensor in by_client:
        assert server[tensor].shape[0] == 4
        assert server[tensor][0].equal(before[tensor][1]), tensor  # kiel
        assert server[tensor][2].equal(before[tensor][0]), tensor  # bonn
    assert bool(by_client) == (name != "scaffold")
    derived = {n for n in before if n.startswith("sum.") or n == "scaffold.num_clients"}
    same = before.keys() - {*by_client} - derived
    assert all(server[n].equal(before[n]) for n in same)
    if name == "scaffold":
        assert server["scaffold.num_clients"] == 4


def held_out(federation: Federation) -> set[int]:
    parts = federation.partition
    return {*parts.validation.rows.tolist(), *parts.test.rows.tolist()}


@pytest.mark.slow
def test_a_grown_table_holds_out_no_row_that_the_old_run_trained_on(
    old: Path, tmp_path: Path
) -> None:
    names = ("bonn", "kiel", "ulm")
    grown = table(range(450), *names)  # the first 300 rows are the old ones
    copy = shutil.copytree(old, tmp_path / "old")
    out = run(going_on(copy, rounds=1), tmp_path / "out", grown)
    before = open_trained(old, "fedsdg", data=OLD_SITES, backbone=digits_backbone()).federation
    trained_on = {*before.partition.train.rows.tolist()}
    drawn = federation_of(going_on(copy), grown, 0)
    leaked = held_out(drawn) & trained_on
    assert leaked
    shutil.rmtree(copy)  # what was left out is known without it
    run(going_on(copy, rounds=2), out, grown)
    after = open_trained(out, "fedsdg", data=grown, backbone=digits_backbone()).federation
    assert held_out(after) == held_out(drawn) - trained_on
    assert set(after.partition.train.rows) == set(drawn.partition.train.rows)
    sizes = sorted(((sum(r % 3 == c for r in leaked), -c) for c in range(3)), reverse=True)
    listed = ", ".join(f"{names[-c]} ({size})" for size, c in sizes)
    said = f"{len(leaked)} held-out rows were training rows of {copy}, left out: {listed}"
    assert said in (out / "run.log").read_text()
    assert f"Data: {said}" in " ".join(ft.compare([out]).split())
    counts = read(out).partitions[0]
    assert counts.labels.sum() == 450 - len(leaked)
    assert counts.test.tolist() == after.partition.test.sizes().tolist()

    third = run(going_on(out, rounds=1), tmp_path / "third", table(range(600), *names))
    rows = held_out(
        open_trained(
            third, "fedsdg", data=table(range(600), *names), backbone=digits_backbone()
        ).federation
    )
    assert rows
    assert not rows & (trained_on | {*after.partition.train.rows.tolist()})


@pytest.mark.slow
def test_clients_without_a_row_that_is_left_to_hold_out_are_named(
    old: Path, tmp_path: Path
) -> None:
    before = open_trained(old, "fedsdg", data=OLD_SITES, backbone=digits_backbone()).federation
    rows = before.partition.train.rows
    known = replace(
        OLD_SITES,
        inputs=replace(OLD_SITES.inputs, values=OLD_SITES.inputs.values[rows]),
        num_train=len(rows),
        labels=OLD_SITES.labels[rows],
        groups=OLD_SITES.groups[rows],
        digest="training rows alone",
    )
    out = run(going_on(old, rounds=1), tmp_path / "out", known)
    assert "3 clients without a test row, not scored: bonn, kiel, ulm" in ft.compare([out])


@pytest.mark.slow
def test_a_table_of_new_rows_alone_is_divided_as_ever(old: Path, tmp_path: Path) -> None:
    fresh = table(range(300, 600), "bonn", "kiel", "ulm")
    drawn = federation_of(going_on(old), fresh, 0)
    out = run(going_on(old, rounds=1), tmp_path / "out", fresh)
    about = json.loads((out / "partitions/seed-0.json").read_text())
    assert about["digest"] == drawn.partition.digest
    assert about["omissions"] == []


@pytest.mark.slow
def test_an_old_run_that_does_not_say_its_training_rows_is_named(old: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(old, tmp_path / "old")
    rows = copy / "partitions/seed-0-trained.safetensors"
    rows.unlink()
    with pytest.raises(ft.InputError, match=rf"{rows.name} is missing"):
        run(going_on(copy, rounds=1), tmp_path / "out")
    without_checksum(copy / "partitions/seed-0.json")
    about = json.loads((copy / "partitions/seed-0.json").read_text())
    del about["trained"]  # as of a run that had no such rows, or began before they were stated
    (copy / "partitions/seed-0.json").write_text(json.dumps(about))
    text = f"whether held-out rows were training rows of {copy} can't be checked"
    out = run(going_on(copy, rounds=1), tmp_path / "out")
    assert text in (out / "run.log").read_text()
    planned = dry_run(going_on(copy), data=NEW_SITES, backbone=digits_backbone())
    assert any(text in line for line in planned.lines())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": {"mine": ft.FedSDG(rank=2)}}, "unknown method 'mine' in .*allowed: fedsdg"),
        ({"methods": {"fedsdg": ft.Local()}}, "fedsdg is fedsdg in .*, and .* is local now"),
        (
            {"methods": {"fedsdg": ft.FedSDG(rank=4)}},
            r"has the shape .*methods\.fedsdg\.rank was 2 and is 4",
        ),
        (
            {"methods": {"fedsdg": ft.FedSDG(rank=2, lora_alpha=99.0)}},
            r"predicts something else .*lora_alpha was 16\.0 and is 99\.0",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    old: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ft.InputError, match=message):
        run(going_on(old, **changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_classes_names_and_runs_are_refused(old: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    other = replace(NEW_SITES, classes=[*"abcdefghij"])
    with pytest.raises(ft.InputError, match=r'classes is \["0".* and \["a".* now; data\.classes'):
        run(going_on(old), out, other)
    strangers = replace(NEW_SITES, client_names=("Bonn", "Kiel", "Lagos"))
    both = (
        r"no client of .* \(bonn, kiel, ulm\) is one of the new data \(Bonn, Kiel, Lagos\); spell"
    )
    with pytest.raises(ft.InputError, match=both):
        run(going_on(old), out, strangers)
    unnamed = going_on(old, split=ft.SplitConfig(3, validation=0.3))
    with pytest.raises(ft.InputError, match="clients have names only in"):
        run(unnamed, out)
    with pytest.raises(ft.InputError, match="is not a run directory"):
        run(going_on(tmp_path), out)
    with pytest.raises(ft.InputError, match="start_from and --out are both"):
        run(going_on(old), old, overwrite=True)
    with pytest.raises(ft.InputError, match="start_from has no run"):
        replace(OLD, start_from=ft.StartConfig(seed=1))


def test_a_file_names_the_run_alone_or_in_a_table(tmp_path: Path) -> None:
    content = {"methods": {"fedavg": {}}}
    short = parse({**content, "start_from": "runs/a"})
    assert short.start_from == ft.StartConfig("runs/a")
    assert parse({**content, "start_from": {"run": "runs/a"}}) == short
    assert replace(short, start_from="runs/a") == short  # type: ignore[arg-type]
    assert parse(short.as_dict()) == short
    with pytest.raises(ft.InputError, match="unknown key 'rum' in start_from"):
        parse({**content, "start_from": {"rum": "runs/a"}})


@pytest.mark.slow
def test_a_run_that_goes_on_from_another_one_can_be_tracked(old: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    seen: dict[int, Values] = {}
    open_trials: list[TrackedTrial] = []

    def look(done: ft.CommittedRound) -> None:
        if not open_trials:  # round 0, the only one so far
            open_trials.extend(trials(out))
        seen.update(open_trials[0].points())

    run(going_on(old), out, on_round=look)
    assert list(seen) == [0, 1, 2]
    assert seen == trials(out)[0].points()
    assert {"seconds/evaluate", "test/personal/accuracy"} <= seen[0].keys()
    assert "train/loss" not in seen[0]
    assert track(out, "tensorboard") == 2


NET = """
import torch

def net():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
"""
MINE = """
from dataclasses import dataclass
from typing import ClassVar

import fedtailor as ft

@dataclass(frozen=True)
class Mine(ft.FineTuning):
    name: ClassVar[str] = "mine"
    needs_only_mean: ClassVar[bool] = True
"""
OWN = """
rounds = 1
data = {name = "digits", limit = 60, limit_test = 20}
split = {clients = 2, min_examples = 5}
model = {factory = "net.py:net", head = ["1"]}
methods.mine = {class = "mine.py:Mine"}
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a method and a network in files, beside them."""
    folder = tmp_path_factory.mktemp("own")
    write_own(folder, NET, MINE)
    ft.run(load(folder / "run.toml"), folder / "old")
    return folder


def write_own(folder: Path, net: str, mine: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "net.py").write_text(net)
    (folder / "mine.py").write_text(mine)
    (folder / "run.toml").write_text(OWN)


def go_on_from_own(own: Path, folder: Path) -> None:
    start = ft.StartConfig(str(own / "old"))
    ft.run(replace(load(folder / "run.toml"), start_from=start), folder / "new")


def test_files_of_ones_own_may_move_and_a_methods_may_change(own: Path, tmp_path: Path) -> None:
    write_own(tmp_path, NET, f"# one more comment\n{MINE}    passes: int = 1\n")
    go_on_from_own(own, tmp_path)
    assert read(tmp_path / "new").trials[0].history[-1].round == 1


def test_another_network_of_the_same_shapes_is_refused(own: Path, tmp_path: Path) -> None:
    write_own(tmp_path, NET.replace("64, 10)", "64, 10), torch.nn.Softmax(1)"), MINE)
    with pytest.raises(ft.InputError) as error:
        go_on_from_own(own, tmp_path)
    assert str(error.value) == (
        f"start_from: model.factory's {tmp_path / 'net.py'} is not the file that {own / 'old'} was "
        f"trained with: the model must be the same; restore it ({own / 'old/factory/net.py'} is a "
        "copy)"
    )


def test_a_method_that_predicts_something_else_is_refused(own: Path, tmp_path: Path) -> None:
    code = """
    def predict(self, task, state, batch):
        return -task.logits(state, batch)
"""
    write_own(tmp_path, NET, MINE + code)
    with pytest.raises(ft.InputError, match=r"mine predicts something else .*mine\.sha256 was "):
        go_on_from_own(own, tmp_path)
    write_own(tmp_path, NET, MINE.replace("Mine(", "Other("))
    (tmp_path / "run.toml").write_text(OWN.replace(":Mine", ":Other"))
    with pytest.raises(ft.InputError, match=r"is mine\.py:Mine in .* is mine\.py:Other now"):
        go_on_from_own(own, tmp_path)
