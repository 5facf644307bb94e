"""A run that is taken back to its best round ends as if it had never been further."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fedtailor as ft
from fedtailor.cli import main
from fedtailor.engine.faults import FaultConfig, Machine
from fedtailor.errors import DivergedError
from fedtailor.report import compare
from fedtailor.runs.check import check
from fedtailor.store.committed import read_commit, state_path
from fedtailor.store.format import seal_json
from fedtailor.store.read import read_trial
from fedtailor.store.row_file import RowFile
from fedtailor.store.selection import select_round
from fedtailor.trackers import follow
from fedtailor.trackers.trial import TrackedTrial, Values, trials
from fedtailor.watch.follow import Follower
from tests.forked import contents
from tests.runs.test_trained import METHODS, WILD, experiment
from tests.small import digits, digits_backbone, without_checksum

LABELS = ("fedper", "fedalt", "fedavg")
CHOSEN = experiment({label: METHODS[label] for label in LABELS}, evaluate={"confusion": True})
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


@pytest.mark.slow
def test_rounds_that_are_run_again_come_out_the_same(
    whole: Path, stopped: Path, tmp_path: Path
) -> None:
    out, rounds = tmp_path / "run", []
    shutil.copytree(stopped, out)
    followed = [(part, part.points()) for part in trials(out)]
    for label in LABELS:
        said = ft.rollback(out, label)
        part = out / "methods" / label / "seed-0"
        rounds.append(read_commit(part).round)
        assert said[0] == f"{label}, seed 0: rolled back from round 4 to round {rounds[-1]}"
        assert len((part / "history.jsonl").read_text().splitlines()) == rounds[-1]
        assert not list(part.glob("*-000004.safetensors"))
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


@pytest.mark.slow
def test_a_finished_method_goes_back_too(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    assert ft.rollback(out, "fedalt")
    assert not check(out).problems
    assert contents(go_on(out)) == contents(whole)


@pytest.mark.slow
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
    refused = out / part / "refused.jsonl"
    refused.write_text("".join(f"{line}\n" for line in lines) + '{"round": 4, "cl')
    assert not check(out).problems
    assert ft.rollback(out) == ["fedper, seed 0: is rolled back to round 2"]
    assert not (out / part / "round-000004.safetensors").exists()
    assert refused.read_text() == f"{lines[0]}\n"
    assert not list((out / part).glob("confusion-000004*"))
    go_on(out)
    refused.unlink()
    assert contents(out) == contents(whole)


def commit_says(out: Path, label: str, **values: object) -> None:
    path = out / f"methods/{label}/seed-0/commit.json"
    content = json.loads(path.read_text())
    del content["checksum"]
    path.write_bytes(seal_json({**content, **values}))


@pytest.mark.slow
def test_damage_is_noticed_before_anything_changes(
    stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    for line in ('{"round": "x"}', "null", '{"round": 4, "cl{"round": 4}'):
        (part / "refused.jsonl").write_text(f"{line}\n")
        with pytest.raises(ft.InputError, match=r"refused\.jsonl"):
            ft.rollback(out, "fedper")
        assert any("refused.jsonl" in problem for problem in check(out).problems)
    (part / "refused.jsonl").write_bytes(before["methods/fedper/seed-0/refused.jsonl"])
    best = out / "methods/fedavg/seed-0/round-000003.safetensors"
    flipped = best.read_bytes()
    best.write_bytes(flipped[:-1] + bytes([flipped[-1] ^ 1]))
    with pytest.raises(ft.InputError, match=r"round-000003.safetensors is damaged"):
        ft.rollback(out, "fedavg")
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
    then = read_commit(out / "methods/fedalt/seed-0").best["global_then"].round
    path = state_path(out / "methods/fedalt/seed-0", then)
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))
    with pytest.raises(ft.InputError, match=rf"round-00000{then}.safetensors is damaged"):
        ft.rollback(out, "fedalt")
    path.write_bytes(before[str(path.relative_to(out))])
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda path, mode: path != part / "private.safetensors")
        with pytest.raises(ft.InputError, match=r"private.safetensors can't be written"):
            ft.rollback(out, "fedper")
    shutil.copy(part / "private.safetensors", part / "private-000004.safetensors")
    with pytest.raises(ft.InputError, match="was killed while it put states into their places"):
        ft.rollback(out, "fedper")
    (part / "private-000004.safetensors").unlink()
    assert contents(out) == before
    commit_says(out, "fedavg", rolled_back=[4] * 100, stopped=True)
    with pytest.raises(ft.InputError, match="fedavg, seed 0, has gone back 100 times, the most"):
        ft.rollback(out, "fedavg")
    ft.rollback(out, "fedper")
    assert (part / "refused.jsonl").read_text() == ""


@pytest.mark.slow
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
    assert re.search(rf"^20\d\d-\S+ \S+  {line}$", (out / "run.log").read_text(), re.MULTILINE)
    go_on(out, replace(chosen, cohort=replace(chosen.cohort, max_norm=3.0, above_norm="clip")))
    number = last.best_round + 1
    note = f"cohort.max_norm is 3.0 from round {number} on; it was none"
    assert f"fedper, seed 0: {note}" in (out / "run.log").read_text()
    assert "max_norm was none, then 3.0 (fedper, seed 0)" in " ".join(compare([out]).split())
    assert read_commit(out / "methods/fedper/seed-0").rolled_back == [last.round]


class Recorder:
    """A tracker that keeps everything, by the key of the part."""

    def __init__(self) -> None:
        self.rounds: dict[str, dict[int, Values]] = {}
        self.results: dict[str, Mapping[str, float | str] | None] = {}
        self._key = ""

    def begin(self, trial: TrackedTrial) -> int:
        self._key = trial.key
        return max(self.rounds.setdefault(trial.key, {}), default=0)

    def log(self, number: int, values: Values) -> None:
        assert number not in self.rounds[self._key]
        self.rounds[self._key][number] = values

    def end(self, trial: TrackedTrial, result: Mapping[str, float | str] | None) -> None:
        self.results[self._key] = result

    def flush(self) -> None:
        pass


@pytest.mark.slow
def test_whoever_follows_sees_the_rounds_that_count(stopped: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(stopped, out)
    refused = [{"round": number, "client": 1, "reason": "x"} for number in (2, 4)]
    path = out / "methods/fedper/seed-0/refused.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in refused))
    part, tracker, follower = trials(out)[0], Recorder(), Follower(out)
    other = replace(CHOSEN, methods={"fedper": CHOSEN.methods["fedper"]})
    other = replace(other, cohort=replace(CHOSEN.cohort, max_norm=1.0, above_norm="clip"))
    steps = iter([lambda: ft.rollback(out, "fedper"), lambda: go_on(out, other)])
    refusals = []

    def wait(seconds: float) -> bool:
        refusals.append(follower.look().trials[0].refused)
        return (step := next(steps, None)) is None or not step()

    before, old = trials(out)[0].points(), part.key
    follow._follow([part], tracker, wait)
    whole = {number: values for number, values in trials(out)[0].points().items() if number}
    assert tracker.rounds == {old: before, part.key: whole}
    assert whole[3] != before[3]
    assert tracker.results[old] is None
    assert tracker.results[part.key]
    assert refusals == [2, 1]
    assert follower.look().trials == Follower(out).look().trials


@pytest.mark.slow
def test_an_asynchronous_method_does_not_go_back(tmp_path: Path) -> None:
    machines = (Machine(0.6, 1e6), Machine(0.4, 2e5))
    cohort = ft.CohortConfig(size=4, buffer=2, above_norm="keep")
    chosen = experiment({"fedper": {"optimiser": {"name": "sgd", "lr": 20.0}}}, seeds=[1])
    chosen = replace(chosen, cohort=cohort, faults=FaultConfig(machines=machines))
    with pytest.raises(DivergedError):
        go_on(tmp_path / "run", chosen)
    commit = read_commit(tmp_path / "run/methods/fedper/seed-1")
    assert commit.best_round < commit.round
    assert "fedtailor rollback" not in (tmp_path / "run/run.log").read_text()
    with pytest.raises(ft.InputError, match="is asynchronous: what clients were training on"):
        ft.rollback(tmp_path / "run")


def test_rounds_whose_updates_were_masked_are_not_summed_again(tmp_path: Path) -> None:
    """With other clients there, a second sum would tell the update of a single one."""
    masks = ft.SecureAggregationConfig(0.6)
    chosen = replace(experiment({"fedavg": {}}), rounds=1, secure_aggregation=masks)
    before = contents(go_on(tmp_path / "run", chosen))
    with pytest.raises(ft.InputError, match="of two sums of a round one could tell a single"):
        ft.rollback(tmp_path / "run", "fedavg")
    assert contents(tmp_path / "run") == before


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
