"""The points that every tracker gets are those of the committed lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fedtailor as ft
from fedtailor.errors import InputError
from fedtailor.report.comparison import compare
from fedtailor.runs.merge import merge
from fedtailor.trackers.trial import trials
from tests.report.conftest import ENVIRONMENT, TAIL, auc, correct, write_run
from tests.small import digits, digits_backbone, without_checksum

Grow = Callable[[int], Path]


def test_points_are_the_committed_rounds(grow: Grow) -> None:
    fedavg, fedsdg = trials(grow(4))
    assert (fedavg.name, fedsdg.name) == ("fedavg-seed-0", "fedsdg-seed-0")
    points = fedsdg.points()
    assert list(points) == [0, 1, 2, 3, 4]  # the made-up run is evaluated before round 1, too
    values = [a for a in correct("fedsdg", 0, "validation", 4, "personal") if a is not None]
    assert points[4]["validation/personal/accuracy"] == pytest.approx(np.mean(values))
    assert points[4]["validation/personal/accuracy_decile"] == pytest.approx(min(values))
    of_auc = [a for a in auc(list(values)) if a is not None]
    assert points[4]["validation/personal/auc"] == pytest.approx(np.mean(of_auc))
    assert points[3]["train/loss"] == 1.5
    assert points[3]["bytes/so_far"] == 3 * 12000
    assert points[3]["seconds/so_far"] == pytest.approx(3 * 2.0)
    assert "validation/personal/accuracy" not in points[3]
    assert (fedsdg.points(), fedsdg.has_ended) == ({}, False)


def test_what_is_new_goes_on_from_what_was_read(grow: Grow) -> None:
    (trial, _) = trials(grow(4))
    whole = trial.points() | {}
    grow(8)
    more = trial.points()
    assert list(more) == [5, 6, 7, 8]
    assert trial.has_ended
    trial.rewind()
    assert trial.points() == {**whole, **more}


def test_the_result_is_the_row_of_the_table(grow: Grow) -> None:
    run = grow(8)
    trial = trials(run)[1]
    trial.points()
    row = json.loads(compare([run], as_json=True))["rows"][1]
    result = trial.result()
    assert result["reported/state"] == "finished"
    assert result["reported/personal/round"] == 4
    assert result["reported/personal/mean"] == row["personal_model"]["mean"]["mean"]
    assert result["reported/personal/auc"] == row["personal_model"]["metrics"]["auc"]["mean"]
    assert result["reported/global/accuracy"] == row["global_model"]["accuracy"]["mean"]
    assert result["reported/trained"] == 1500


def test_settings_are_flat_and_the_key_is_the_directorys(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", seeds=(0, 1))
    every = trials(run)
    assert len({trial.key for trial in every}) == 4
    config = every[0].config()
    assert (config["method.name"], config["seed"], config["split.clients"]) == ("fedavg", 0, 6)
    assert config["versions.torch"] == "2.13.0"
    assert all(isinstance(value, str | int | float | bool) for value in config.values())
    other = write_run(tmp_path / "b", seeds=(0, 1))
    assert trials(other)[0].key == every[0].key  # a copy
    (other / "environment.json").write_text(json.dumps(ENVIRONMENT | {"date": "2026-11-22"}))
    assert trials(other)[0].key != every[0].key


@pytest.mark.slow
def test_runs_begun_in_the_same_second_have_keys_of_their_own(tmp_path: Path) -> None:
    experiment = ft.Experiment(
        {"local": ft.Local()}, rounds=1, split=ft.SplitConfig(2, max_examples=12),
        local=ft.LocalConfig(steps=1),
    )  # fmt: skip
    keys = []
    for name in ("a", "b"):
        run = tmp_path / name
        ft.run(experiment, run, data=digits(), backbone=digits_backbone())
        file = without_checksum(run / "environment.json")
        file.write_text(json.dumps({**json.loads(file.read_text()), "date": "2026-11-22"}))
        keys.append(trials(run)[0].key)
        ft.run(replace(experiment, rounds=2), run, data=digits(), backbone=digits_backbone())
        assert trials(run)[0].key == keys[-1]
    assert keys[0] != keys[1]
    assert trials(merge([tmp_path / "a"], tmp_path / "merged"))[0].key == keys[0]


def test_what_is_no_run_or_damaged_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no directory"):
        trials(tmp_path / "nowhere")
    run = write_run(tmp_path / "run", seeds=(0,), tail=TAIL)
    log = run / "methods/fedavg/seed-0/history.jsonl"
    log.write_bytes(log.read_bytes()[:100])
    with pytest.raises(InputError, match="holds 100 bytes, fewer than"):
        trials(run)[0].points()
