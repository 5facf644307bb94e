"""What a run says while it runs."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

import fedtailor as ft
from fedtailor.runs import progress
from fedtailor.runs.progress import Progress, Stage
from fedtailor.store.format import SHARE_OF_RUN
from tests.small import digits, digits_backbone


@pytest.fixture
def talkative(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pause between two lines."""
    for name in ("_REFRESH", "_FIRST_PAUSE", "_PAUSE"):
        monkeypatch.setattr(progress, name, 0.0)


@pytest.mark.slow
@pytest.mark.usefixtures("talkative")
def test_lines_have_scores_clients_and_the_time_left(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    experiment = ft.Experiment(
        {"fedavg": ft.FedAvg(), "local": ft.Local()},
        rounds=2,
        split=ft.SplitConfig(3, max_examples=12),
        local=ft.LocalConfig(steps=1),
        engine=ft.EngineConfig(executor="sequential"),
    )
    ft.run(experiment, tmp_path, data=digits(), backbone=digits_backbone(), summary=False)
    lines = capfd.readouterr().err.splitlines()
    logged = (tmp_path / "run.log").read_text().splitlines()
    assert [line.split("  ", 1)[1] for line in logged] == lines
    left = r"about \d+ s left"
    number, loss = r"\d+\.\d", r"loss \d\.\d{3}"
    expected = [
        # as long as nothing is known of the time that is left, no time is named
        r"fedavg, seed 0: round 1 of 2, training: 1 of 3 clients, \d s so far; 0 % of the run",
        rf"fedavg, seed 0: round 1 of 2, training: 2 of 3 clients, \d s so far; 0 % .*, {left}",
        rf"fedavg, seed 0: round 2 of 2, {loss}, validation {number}, global {number}; "
        rf"50 % of the run, {left}",
        rf"local, seed 0: round 1 of 2, evaluation: 3 of 3 clients, \d s so far; 50 % .*, {left}",
        rf"local, seed 0: round 1 of 2, {loss}, validation {number}; 75 % of the run, {left}",
    ]
    for line in expected:
        assert any(re.fullmatch(line, one) for one in lines), line

    longer = replace(experiment, rounds=4)  # half of it is there
    ft.run(longer, tmp_path, data=digits(), backbone=digits_backbone(), summary=False)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "fedavg, seed 0: goes on after round 2 of 4"
    line = r"fedavg, seed 0: round 3 of 4, training: 1 of 3 clients, \d s so far; 50 % of the run"
    assert any(re.fullmatch(line, one) for one in lines), lines


def test_the_time_left_is_each_methods_own(tmp_path: Path) -> None:
    left = {("quick", 0): 3, ("slow", 0): 2, ("slow", 1): 2, ("unknown", 0): 0}
    with Progress(tmp_path / "log", left, {"quick": 1.0, "slow": 100.0}) as shown:
        assert shown._seconds_left() == pytest.approx(403, abs=0.1)
        shown.begin(Stage("slow", "slow, seed 0", 2, {}), done=0)
        shown.skip("slow", 1)
        assert shown._seconds_left() == pytest.approx(303, abs=0.1)
        shown._measured["slow"] = [150.0, 250.0]  # half as fast as expected
        assert shown._seconds_left() == pytest.approx(603, abs=0.1)


def test_a_slow_round_takes_no_time_from_the_others(tmp_path: Path) -> None:
    left = {("slow", 0): 2, ("other", 0): 8}
    with Progress(tmp_path / "log", left, {"slow": 5.0, "other": 10.0}) as shown:
        shown.begin(Stage("slow", "slow, seed 0", 2, {}), done=0)
        assert shown._seconds_left() == pytest.approx(90, abs=0.1)
        shown._round_begun -= 62  # writing of texts
        assert shown._seconds_left() == pytest.approx(85, abs=0.1)
        shown._left["slow"] = 0  # its last round has ended
        assert shown._seconds_left() == pytest.approx(80, abs=0.1)


@pytest.mark.usefixtures("talkative")
def test_the_clients_that_are_done_tell_what_is_left_of_a_slow_round(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with Progress(tmp_path / "log", {("slow", 0): 1}, {"slow": 0.0}) as shown:
        shown.begin(Stage("slow", "slow, seed 0", 1, {"write": 50}), done=0)
        shown._last_result -= 10
        shown.on_result("write", 1)
        shown.on_result("write", 2)  # of 10 seconds
        assert shown._seconds_left() == pytest.approx(240, abs=3)
    assert "writing: 2 of 50 clients" in capfd.readouterr().err


@pytest.mark.usefixtures("talkative")
def test_the_first_clients_say_more_about_a_round_than_one_step_did(tmp_path: Path) -> None:
    expected = {"slow": 1e4, "other": 1.0}
    with Progress(tmp_path / "log", {("slow", 0): 3, ("other", 0): 0}, expected) as shown:
        shown._measured["other"] = [1000.0]  # which says nothing of what is measured
        shown.begin(Stage("slow", "slow, seed 0", 3, {"train": 20}), done=0)
        time.sleep(0.1)
        shown.on_result("train", 2)
        assert shown._seconds_left() == pytest.approx(2.9, abs=1)


@pytest.mark.usefixtures("talkative")
def test_a_part_that_diverges_takes_its_rounds_out_of_the_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sgd = ft.Optimiser("sgd", lr=1e6, weight_decay=1e6)
    experiment = ft.Experiment(
        {"bad": ft.Local(optimiser=sgd), "good": ft.Local()},
        rounds=2,
        split=ft.SplitConfig(2, max_examples=12),
        local=ft.LocalConfig(steps=5),
        engine=ft.EngineConfig(executor="sequential"),
    )
    ft.run(experiment, tmp_path, data=digits(), backbone=digits_backbone(), summary=False)
    lines = capfd.readouterr().err.splitlines()
    assert any(line.startswith("bad, seed 0 ends here: the loss of client") for line in lines)
    done = next(line for line in lines if line.startswith("good, seed 0: round 1 of 2, loss"))
    share = SHARE_OF_RUN.search(done)
    assert share is not None
    assert share.group().startswith("; 50 % of the run, about ")
