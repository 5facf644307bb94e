"""What is said before a run, and that nothing of it changes the run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedtailor as ft
from fedtailor.data.table import Dataset
from fedtailor.runs import estimate
from fedtailor.runs.estimate import rounds_left
from fedtailor.runs.run import dry_run
from fedtailor.task.backbone import Backbone
from tests.engine.test_rounds import Normed
from tests.runs.conftest import EXPERIMENT, FOLDER
from tests.small import digits, digits_backbone, without_checksum


def sites() -> Dataset:
    """Digits of three hospitals with names, and one with too few rows."""
    dataset = digits()
    groups = np.arange(len(dataset.inputs)) % 3
    groups[:4] = 3
    return replace(dataset, groups=groups, client_names=("berlin", "7", "lagos", "nice"))


NAMED = replace(
    EXPERIMENT,
    methods={"fedavg": ft.FedAvg(), "fedsdg": ft.FedSDG(rank=2)},
    split=ft.SplitConfig(scheme="natural", max_examples=30),
)


@pytest.mark.slow
def test_the_costs_are_those_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    assert not dry_run(NAMED, out, data=sites(), backbone=digits_backbone()).hints
    monkeypatch.setattr(estimate, "_LARGE", 1)
    idle = replace(NAMED, schedule=ft.ScheduleConfig(final=0.5))
    summary = dry_run(idle, out, data=sites(), backbone=digits_backbone())
    assert not out.exists()
    ft.run(NAMED, out, data=sites(), backbone=digits_backbone())
    for one in summary.methods:
        costs = json.loads((out / f"methods/{one.label}/seed-0/costs.json").read_text())
        assert (one.trained, one.communicated, one.private) == (
            costs["trained"], costs["communicated"], costs["private"],
        )  # fmt: skip
        history = (out / f"methods/{one.label}/seed-0/history.jsonl").read_text().splitlines()
        sent = sum(line["bytes_down"] + line["bytes_up"] for line in map(json.loads, history))
        assert one.bytes_total == sent
    assert 0 < summary.seconds < 60
    slow = replace(summary, methods=[replace(one, cache_seconds=5.0) for one in summary.methods])
    assert slow.seconds == pytest.approx(summary.seconds + 10)
    text = "\n".join(summary.lines())
    assert "clients   3: berlin, 7, lagos\n" in text
    assert "left out: nice (4)\n" in text
    assert "(least, median, most): train 27, 27, 27; test 119, 120, 120\n" in text
    hint = "the whole model is trained by fedavg; a small adapter is trained with methods.fedavg."
    assert f'  hint      {hint}trainable = "lora"\n' in text
    assert "  hint      schedule.final = 0.5 has no effect" in text
    assert json.loads(summary.as_json())["client_names"] == ["berlin", "7", "lagos"]
    log = (out / "run.log").read_text()
    assert "clients   3: berlin, 7, lagos\n" in log


def test_the_time_is_a_range_where_cores_may_be_busy(tmp_path: Path) -> None:
    def line(executor: str, processes: int = 2) -> tuple[str, dict[str, Any]]:
        engine = ft.EngineConfig(executor=executor, processes=processes)
        experiment = replace(EXPERIMENT, engine=engine)
        summary = dry_run(experiment, tmp_path / "run", data=digits(), backbone=digits_backbone())
        (time,) = (line for line in summary.lines() if line.startswith("  time "))
        return time, json.loads(summary.as_json())

    time, content = line("processes")
    assert " on 2 idle cores, " in time
    assert " if half of them are busy (from one client's step)" in time
    assert content["seconds_if_busy"] == 2 * content["seconds"]
    for most in (line("sequential"), line("auto", processes=20)):  # most of these would be idle
        time, content = most
        assert "idle" not in time
        assert content["seconds_if_busy"] == content["seconds"]


@pytest.mark.slow
def test_it_changes_no_number(tmp_path: Path) -> None:
    said, unsaid = tmp_path / "a", tmp_path / "b"
    for out, summary in ((said, True), (unsaid, False)):
        ft.run(NAMED, out, data=sites(), backbone=digits_backbone(), summary=summary)
    for name in ("history.jsonl", "clients.jsonl", "server.safetensors", "private.safetensors"):
        path = f"methods/fedsdg/seed-0/{name}"
        assert (said / path).read_bytes() == (unsaid / path).read_bytes()


@pytest.mark.slow
def test_rounds_that_are_left(finished: Path, unfinished: Path, tmp_path: Path) -> None:
    experiment = replace(EXPERIMENT, seeds=(0, 1))
    assert rounds_left(experiment, finished) == {("fedsdg", 0): 0, ("fedsdg", 1): 2}
    assert rounds_left(experiment, unfinished) == {("fedsdg", 0): 1, ("fedsdg", 1): 2}
    path = without_checksum(unfinished / FOLDER / "commit.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"diverged": "the loss is nan"}))
    assert rounds_left(experiment, unfinished)["fedsdg", 0] == 1
    assert rounds_left(experiment, tmp_path / "nowhere")["fedsdg", 0] == 2


@pytest.mark.slow
def test_it_says_what_is_there_and_what_will_be_trained(finished: Path, tmp_path: Path) -> None:
    def progress(out: Path, **changes: Any) -> list[str]:
        experiment = replace(EXPERIMENT, **changes)
        summary = dry_run(experiment, out, data=digits(), backbone=digits_backbone())
        return [line for line in summary.lines() if line.startswith(("  done", "  to train"))]

    added = ["  done      seed 0: fedsdg", "  to train  seed 1: fedsdg"]
    assert progress(finished, seeds=(0, 1)) == added
    more = progress(finished, rounds=4, schedule=ft.ScheduleConfig("constant"))
    assert more == ["  to train  seed 0: fedsdg (from round 3)"]
    assert progress(tmp_path / "new") == []


def test_a_run_that_is_done_says_so_alone(
    finished: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ft.run(EXPERIMENT, finished, data=digits(), backbone=digits_backbone())
    assert capfd.readouterr().err == f"{finished} is finished: nothing is left to run\n"


@pytest.mark.slow
def test_a_metric_that_is_undefined_for_all_is_said_before_and_null_after(tmp_path: Path) -> None:
    out = tmp_path / "run"
    one_class = replace(
        NAMED,
        rounds=2,
        methods={"fedavg": ft.FedAvg()},
        split=ft.SplitConfig(10, scheme="pathological", classes_per_client=1),
        evaluate=ft.EvaluateConfig(metrics=("auc", "matthews"), select="auc"),
    )
    arguments: dict[str, Any] = {"data": digits(), "backbone": digits_backbone()}
    hints = dry_run(one_class, out, **arguments).hints
    assert "auc, matthews: undefined for 10 of 10 clients, whose validation rows" in hints[0]
    assert hints[0].endswith("can choose no round: the last is reported")
    ft.run(one_class, out, **arguments)
    assert "nan" not in ft.compare(out)
    (row,) = json.loads(ft.compare(out, as_json=True))["rows"]
    assert row["personal_model"]["rounds"] == [2]
    assert row["personal_model"]["mean"]["mean"] is None
    assert ft.write_report(out, out / "report.html").exists()
    for path in out.rglob("*.json*"):
        assert b"NaN" not in path.read_bytes()


def test_batches_that_are_left_out_are_counted(tmp_path: Path) -> None:
    nine = replace(
        NAMED,
        methods={"fedavg": ft.FedAvg()},
        split=ft.SplitConfig(3, max_examples=9, validation=0.0),
        local=ft.LocalConfig(batch_size=4),
    )
    backbone = Backbone(Normed(), name="normed")
    hints = dry_run(nine, tmp_path / "run", data=digits(), backbone=backbone).hints
    assert hints == [
        "fedavg: the last batch of each epoch is left out at 3 clients, since it has one example, "
        "too few for batch normalisation"
    ]


def test_it_is_said_where_evaluation_takes_most_of_the_time(tmp_path: Path) -> None:
    many = replace(
        NAMED,
        methods={"fedavg": ft.FedAvg()},
        split=ft.SplitConfig(120, min_examples=3),
        cohort=ft.CohortConfig(size=2),
        local=ft.LocalConfig(batch_size=8),
    )
    arguments: dict[str, Any] = {"data": digits(), "backbone": digits_backbone()}
    (hint,) = dry_run(many, tmp_path / "run", **arguments).hints
    assert "% of the time goes into evaluating 120 clients; a larger evaluate.every" in hint
    assert not dry_run(replace(many, cohort=ft.CohortConfig()), tmp_path / "run", **arguments).hints
