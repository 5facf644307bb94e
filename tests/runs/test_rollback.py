"""A run that is taken back to its best round ends as if it had never been further."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fedtailor as ft
from fedtailor.cli import main
from fedtailor.engine.row_file import RowFile
from fedtailor.report import compare
from fedtailor.report.read import read_trial
from fedtailor.report.select import select_round
from fedtailor.run_format import seal_json
from fedtailor.runs.check import check
from fedtailor.runs.committed import read_commit, state_path
from fedtailor.trackers.part import parts
from tests.runs.conftest import contents
from tests.runs.test_trained import METHODS, WILD, experiment
from tests.small import digits, digits_backbone, without_checksum

LABELS = ("fedper", "fedalt", "fedavg")
CHOSEN = experiment({label: METHODS[label] for label in LABELS})


WIDE = {"rounds": 40, "cohort": {"size": 2, "above_norm": "keep"}}


def go_on(out: Path, chosen: ft.Experiment = CHOSEN, until: int | None = None) -> Path:
    stop = None if until is None else lambda done: ft.STOP if done.number == until else None
    ft.run(chosen, out, data=digits(), backbone=digits_backbone(), on_round=stop)
    return out


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return go_on(tmp_path_factory.mktemp("runs") / "whole")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After four of six rounds, of which the last is the best for no method. Of FedALT's global
    model a later round is the best one than of its personal models."""
    return go_on(tmp_path_factory.mktemp("runs") / "stopped", until=4)


def test_rounds_that_are_run_again_come_out_the_same(
    whole: Path, stopped: Path, tmp_path: Path
) -> None:
    out, rounds = tmp_path / "run", []
    shutil.copytree(stopped, out)
    followed = [(part, part.points()) for part in parts(out)]
    for label in LABELS:
        said = ft.rollback(out, label)
        part = out / "methods" / label / "seed-0"
        rounds.append(read_commit(part).round)
        assert said[0] == f"{label}, seed 0: rolled back from round 4 to round {rounds[-1]}"
        assert len((part / "history.jsonl").read_text().splitlines()) == rounds[-1]
        assert not (part / "round-000004.safetensors").exists()
        trial = read_trial(part, label, label, 0)
        for model, best in trial.commit.best.items():  # no other round than the table's
            selected = select_round(trial, model, "accuracy")  # type: ignore[arg-type]
            assert selected is not None
            assert selected.round == best.round
            assert state_path(part, best.round).exists()
    assert rounds == [2, 2, 3]
    for (part, before), last in zip(followed, rounds, strict=True):
        key = part.key
        assert part.points() == {number: before[number] for number in range(1, last + 1)}
        assert part.key != key  # another run of a tracker
        assert part.name.endswith("-seed-0-rolled-back-1")
    found = check(out)
    assert not found.problems
    assert "Rolled back: fedper, seed 0, from round 4 to its best round" in compare([out])
    assert contents(go_on(out)) == contents(whole)


def test_a_finished_method_goes_back_too(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    assert ft.rollback(out, "fedalt")
    assert not check(out).problems
    assert contents(go_on(out)) == contents(whole)


def test_a_kill_inside_a_roll_back_loses_nothing(
    whole: Path, stopped: Path, tmp_path: Path
) -> None:
    """The commit counts, and private states of later rounds lie in their places still."""
    out, copy = tmp_path / "run", tmp_path / "copy"
    for path in (out, copy):
        shutil.copytree(stopped, path)
    ft.rollback(copy, "fedper")
    part = Path("methods/fedper/seed-0")
    commit = json.loads(without_checksum(copy / part / "commit.json").read_text())
    commit["checksums"].pop("private.safetensors")
    (out / part / "commit.json").write_bytes(seal_json(commit))
    lines = [json.dumps({"round": number, "client": 1, "reason": "x"}) for number in (2, 4)]
    (out / part / "refused.jsonl").write_text("".join(f"{line}\n" for line in lines))
    assert not check(out).problems
    go_on(out)
    assert (out / part / "refused.jsonl").read_text() == f"{lines[0]}\n"
    (out / part / "refused.jsonl").unlink()
    assert contents(out) == contents(whole)


def commit_says(out: Path, label: str, **values: object) -> None:
    path = out / f"methods/{label}/seed-0/commit.json"
    content = json.loads(path.read_text())
    del content["checksum"]
    path.write_bytes(seal_json({**content, **values}))


def test_damage_is_noticed_before_anything_changes(stopped: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(stopped, out)
    part = out / "methods/fedper/seed-0"
    refused = {"round": 4, "client": 1, "reason": "x"}
    (part / "refused.jsonl").write_text(2 * f"{json.dumps(refused)}\n" + '{"round": 4, "cl')
    path = part / "private-best-000002.safetensors"
    kept, before = RowFile.open(path), contents(out)
    value = max(kept.read(kept.written()[0]).values(), key=torch.numel).numpy().tobytes()
    path.write_bytes(path.read_bytes().replace(value, value[::-1]))
    with pytest.raises(ft.InputError, match=r"private-best-000002.safetensors is damaged"):
        ft.rollback(out, "fedper")
    path.write_bytes(before[str(path.relative_to(out))])
    best = out / "methods/fedavg/seed-0/round-000003.safetensors"
    best.unlink()
    for label in LABELS:
        commit_says(out, label, diverged="x")
    changed = contents(out)
    with pytest.raises(ft.InputError, match=r"round-000003.safetensors is missing; restore it"):
        ft.rollback(out)  # the first method does not go back either
    assert contents(out) == changed
    best.write_bytes(before[str(best.relative_to(out))])
    for label in LABELS:
        commit_says(out, label, diverged=None)
    assert contents(out) == before
    commit_says(out, "fedavg", rolled_back=[4] * 100)
    with pytest.raises(ft.InputError, match="fedavg, seed 0, has gone back 100 times, the most"):
        ft.rollback(out, "fedavg")
    ft.rollback(out, "fedper")
    assert (part / "refused.jsonl").read_text() == ""


def test_a_method_that_diverged_goes_back_and_on_with_a_bound(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, chosen = tmp_path / "run", experiment({"fedper": WILD, "fedavg": {}}, **WIDE)
    go_on(out, chosen)
    last = read_commit(out / "methods/fedper/seed-0")
    assert last.diverged
    assert last.best_round < last.round
    hint = f"fedtailor rollback takes it back to round {last.best_round}, the best on validation"
    assert hint in (out / "run.log").read_text()
    assert main(["rollback", str(out)]) == 0
    line = f"fedper, seed 0: rolled back from round {last.round} to round {last.best_round}"
    assert capsys.readouterr().out.splitlines()[0] == line
    assert line in (out / "run.log").read_text()
    go_on(out, replace(chosen, cohort=replace(chosen.cohort, max_norm=3.0, above_norm="clip")))
    number = last.best_round + 1
    line = f"round {number}: cohort.max_norm is 3.0 from here on; it was none"
    assert line in (out / "run.log").read_text()
    note = f"fedper, seed 0: cohort.max_norm is 3.0 from round {number} on; it was none"
    assert note in " ".join(compare([out]).split())
    assert read_commit(out / "methods/fedper/seed-0").rolled_back == [last.round]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing in RUN has diverged; --method takes back one that has not"),
        (["--method", "fedprox"], "fedprox"),
        (["--seed", "9"], "no seed 9 in RUN; allowed: 0"),
    ],
)
def test_what_cannot_go_back_is_said(
    whole: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(whole)
    assert main(["rollback", str(whole), *arguments]) == 2
    assert re.search(re.escape(message.replace("RUN", str(whole))), capsys.readouterr().err)
    assert contents(whole) == before
