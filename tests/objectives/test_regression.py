"""Numbers to predict: scaled on the way in and out, everywhere alike."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor.data.table import Dataset
from fedtailor.objectives import Regression
from fedtailor.objectives.cells import Cells
from fedtailor.report import compare
from fedtailor.task.backbone import Backbone
from tests import kinds
from tests.flower.grid import experiment
from tests.small import digits, digits_backbone

SCALE = (39.0, 6.0)


def numbers(scale: tuple[float, ...] = SCALE) -> Dataset:
    """A temperature for each digit."""
    classes = digits()
    assert classes.labels is not None
    values = 30.0 + 2 * classes.labels.astype(np.float64)
    return replace(
        classes, task=Regression.name, labels=values, classes=(), scale=scale, digest="numbers"
    )


def backbone() -> Backbone:
    made = digits_backbone()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        made.model.head = torch.nn.Linear(16, 1)
    return replace(made, objective=Regression())


def lines(out: Path, label: str) -> list[dict[str, Any]]:
    text = (out / "methods" / label / "seed-0/clients.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.slow
def test_predictions_are_in_the_unit_of_the_targets() -> None:
    texts, targets = kinds.rows(Regression.name)
    model = ft.load_model(kinds.finished(Regression.name) / "run", "fedsdg", "a")
    assert np.abs(np.array(model.predict(texts)) - np.mean(targets)).max() < 10


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["1.234,50", " 7 ", "0,5"], [1234.5, 7, 0.5]),
        (["-1 234,5", "1.000", "2.5"], [-1234.5, 1000, 2.5]),
        (["1,234.5", "1,000", "2.5"], [1234.5, 1000, 2.5]),
        (["1,5", "1,234"], [1.5, 1.234]),
    ],
)
def test_commas_are_read_as_the_whole_column_has_them(
    cells: list[str], expected: list[float]
) -> None:
    assert Regression().targets(Cells(cells, len(cells))).values.tolist() == expected


@pytest.mark.parametrize("cells", [["1,234"], ["1.234,5", "1,234.5"], ["1,5,2"]])
def test_commas_that_may_be_either_are_refused(cells: list[str]) -> None:
    with pytest.raises(ft.InputError, match=r"in row 1: the task .* needs numbers such as 1234"):
        Regression().targets(Cells(cells, len(cells)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0, "warm", 2.0], "column 'fever' holds 'warm' in row 2: the task .* numbers"),
        ([1.0, float("inf"), 2.0], "column 'fever' holds inf in row 2"),
        ([10**400, 1.0, 2.0], "column 'fever' holds 1000.* in row 1: the task .* numbers"),
        ([True, False, True], "column 'fever' holds True in row 1"),
        ([None, None, None], "no row of the training split has a number"),
    ],
)
def test_what_is_no_number_is_named(values: list[Any], message: str) -> None:
    with pytest.raises(ft.InputError, match=message):
        Regression().targets(Cells(values, 3, place="column 'fever'"))


def test_one_number_is_nothing_to_learn_unless_the_scale_is_told() -> None:
    pixels = np.zeros((3, 8, 8), np.uint8)
    source = ft.Data.from_arrays(pixels, [4, 4.0, 4], task=Regression.name)
    config = source.config(ft.DataConfig())
    with pytest.raises(ft.InputError, match="all training rows have the number 4; there is noth"):
        source.load(config, None)
    told = source.load(replace(config, scale=SCALE), None)  # as of a client that joins
    assert told.objective.scaled(()) == Regression(*SCALE)
    assert told.scale == SCALE


def test_own_metrics_stand_beside_those_that_are_always_there(tmp_path: Path) -> None:
    def bias(targets: np.ndarray, predictions: np.ndarray) -> float:
        return float((predictions[:, 0] - targets).mean())

    chosen = experiment("fedavg", {}, split={"clients": 3, "max_examples": 14}, rounds=1)
    out = ft.run(
        chosen, tmp_path / "run", data=numbers(), backbone=backbone(), metrics={"bias": bias}
    ).path
    assert [*lines(out, "fedavg")[-1]["metrics"]] == [*Regression.metrics, "bias"]
    with pytest.raises(ft.InputError, match=r"unknown metric 'accuracy' in .* they have: bias"):
        compare(out, metric="accuracy")


def test_a_metric_that_is_undefined_is_not_a_number() -> None:
    flat, other = np.full(3, 37.0), np.array([[36.0], [37.0], [38.0]])
    undefined = {name for name, one in Regression.metrics.items() if np.isnan(one(flat, other))}
    assert undefined == {"r2", "pearson", "spearman"}
    same = np.full((3, 1), 37.0)  # a model that has collapsed
    assert [Regression.metrics[name](other[:, 0], same) for name in ("pearson", "spearman")] == [
        0,
        0,
    ]
    assert Regression.metrics["rmse"](flat, other) == pytest.approx((2 / 3) ** 0.5)


def test_no_accuracy_can_choose_the_round(tmp_path: Path) -> None:
    chosen = experiment("fedavg", {}, split={"clients": 3}, evaluate={"select": "accuracy"})
    with pytest.raises(ft.InputError, match="unknown metric 'accuracy'"):
        ft.run(chosen, tmp_path / "run", data=numbers(), backbone=backbone())
