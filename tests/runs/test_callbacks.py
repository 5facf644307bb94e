"""Callbacks: what they see, how they stop a part, and that the part goes on as if nothing was."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedtailor as ft
from fedtailor.runs.trained import open_trained
from fedtailor.store.metrics import rounded
from fedtailor.store.read import read
from tests.runs.conftest import EXPERIMENT, FOLDER
from tests.small import digits, digits_backbone

SPEC = replace(EXPERIMENT, rounds=4, methods={"fedsdg": ft.FedSDG(rank=2), "local": ft.Local()})
NAMES = ("history.jsonl", "clients.jsonl", "server.safetensors", "private.safetensors")


def run(out: Path, **more: object) -> Path:
    ft.run(SPEC, out, data=digits(), backbone=digits_backbone(), **more)  # type: ignore[arg-type]
    return out


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("runs") / "whole")


def commit(out: Path, label: str = "fedsdg") -> dict[str, object]:
    content: dict[str, object] = json.loads(
        (out / f"methods/{label}/seed-0/commit.json").read_text()
    )
    return content


def lines(folder: Path) -> list[dict[str, Any]]:
    """The evaluations of the personal models on validation data, one a round."""
    every = map(json.loads, (folder / "clients.jsonl").read_text().splitlines())
    return [line for line in every if (line["model"], line["split"]) == ("personal", "validation")]


@pytest.mark.slow
def test_it_sees_every_committed_round_of_every_part(tmp_path: Path) -> None:
    seen = []

    def on_round(done: ft.CommittedRound) -> None:
        (line,) = lines(done.folder)[done.number - 1 :]
        assert done.score() == done.score("accuracy") == rounded(np.mean(line["accuracy"]))
        assert done.score(split="test") != done.score("loss")
        seen.append((done.label, done.seed, done.number, done.rounds))

    run(tmp_path / "run", on_round=on_round)
    assert seen == [("fedsdg", 0, n, 4) for n in range(1, 5)] + [
        ("local", 0, n, 4) for n in range(1, 5)
    ]


@pytest.mark.slow
def test_a_stopped_part_can_be_used_and_goes_on_to_the_same_bytes(
    whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def stop(done: ft.CommittedRound) -> object:
        return ft.STOP if (done.label, done.number) == ("fedsdg", 2) else None

    out = run(tmp_path / "run", on_round=stop)
    assert "fedsdg, seed 0: stopped after round 2 of 4" in capfd.readouterr().err
    assert (commit(out)["round"], commit(out)["stopped"]) == (2, True)
    assert (commit(out, "local")["round"], commit(out, "local")["finished"]) == (4, True)
    trial = next(trial for trial in read(out).trials if trial.label == "fedsdg")
    assert trial.progress == "stopped after round 2 of 4"
    assert open_trained(out, "fedsdg", data=digits(), backbone=digits_backbone()).client_state(0)
    assert "Stopped: fedsdg, seed 0: stopped after round 2 of 4" in ft.compare([out])
    run(out)
    assert commit(out)["stopped"] is False
    for name in NAMES:
        assert (out / FOLDER / name).read_bytes() == (whole / FOLDER / name).read_bytes()


@pytest.mark.slow
def test_stopping_at_the_last_round_is_the_end(tmp_path: Path) -> None:
    def stop(done: ft.CommittedRound) -> object:
        return ft.STOP if done.number == done.rounds else None

    out = run(tmp_path / "run", on_round=stop)
    assert commit(out)["finished"] is True


@pytest.mark.slow
def test_its_error_ends_the_run_which_goes_on_later(whole: Path, tmp_path: Path) -> None:
    def fail(done: ft.CommittedRound) -> None:
        raise ZeroDivisionError("mine")

    out = tmp_path / "run"
    with pytest.raises(ZeroDivisionError, match="mine"):
        run(out, on_round=fail)
    assert commit(out)["round"] == 1
    with pytest.raises(ft.InputError, match=r"on_round returned True; allowed: None, or fedtailor"):
        run(out, on_round=lambda done: True)
    assert commit(out)["round"] == 2
    run(out)
    assert (out / FOLDER / NAMES[1]).read_bytes() == (whole / FOLDER / NAMES[1]).read_bytes()


@pytest.mark.slow
def test_early_stopping_counts_evaluations_without_a_better_one(tmp_path: Path) -> None:
    stopping = ft.EarlyStopping(patience=1)
    out = run(tmp_path / "run", on_round=stopping)
    means = [float(np.mean(line["accuracy"])) for line in lines(out / FOLDER)]
    first_worse = next((n for n in range(1, len(means)) if means[n] <= max(means[:n])), 3)
    assert commit(out)["round"] == len(means) == first_worse + 1


@pytest.mark.slow
def test_early_stopping_passes_over_rounds_without_the_metric(tmp_path: Path) -> None:
    """Such as one of written texts, which are rarer than evaluations."""
    seen: list[float | None] = []

    def blank(done: ft.CommittedRound) -> ft.Stop | None:
        few = [
            replace(e, metrics={"rare": [None] * len(e.clients)}) for e in done.round.evaluations
        ]
        never = replace(done, select="rare", round=replace(done.round, evaluations=few))
        seen.append(never.score())
        return stopping(never)

    stopping = ft.EarlyStopping(patience=1)
    out = run(tmp_path / "run", on_round=blank)
    assert commit(out)["finished"]
    assert seen
    assert {*seen} == {None}


@pytest.mark.slow
def test_early_stopping_remembers_rounds_before_a_kill(tmp_path: Path) -> None:
    def kill(done: ft.CommittedRound) -> None:
        if done.number == 2:
            raise KeyboardInterrupt

    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        run(out, on_round=kill)
    stopping = ft.EarlyStopping(patience=3)
    run(out, on_round=stopping)
    assert [*stopping._scores[out / FOLDER]] == [1, 2, 3, 4]
    with pytest.raises(ft.InputError, match="patience = 0: must be at least 1"):
        ft.EarlyStopping(patience=0)


@pytest.mark.slow
def test_own_metrics_from_python_select_the_round(tmp_path: Path) -> None:
    def first_class(labels: np.ndarray, probabilities: np.ndarray) -> float:
        return float(probabilities[:, 0].mean())

    spec = replace(SPEC, evaluate=ft.EvaluateConfig(metrics=("auc",), select="first_class"))
    out = tmp_path / "run"
    given = {"data": digits(), "backbone": digits_backbone()}
    ft.run(spec, out, metrics={"first_class": first_class}, **given)  # type: ignore[arg-type]
    evaluated = lines(out / FOLDER)
    assert list(evaluated[0]["metrics"]) == ["auc", "first_class"]
    chosen = json.loads(ft.compare([out], as_json=True))
    assert chosen["metric"] == "first_class"
    best = np.argmax([np.mean(line["metrics"]["first_class"]) for line in evaluated]) + 1
    assert chosen["rows"][0]["personal_model"]["rounds"] == [best]
    named = replace(spec, evaluate=replace(spec.evaluate, metrics=("auc", "first_class")))
    with pytest.raises(ft.InputError, match=r"unknown metric 'first_class' in evaluate\.metrics"):
        ft.run(named, out, **given)  # type: ignore[arg-type]
