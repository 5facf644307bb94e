"""Any number of labels an example: how they are read, scored and predicted."""

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
from fedtailor.export.folder import export_model
from fedtailor.objectives import MultiLabel
from fedtailor.objectives.cells import Cells
from fedtailor.task.backbone import Backbone
from tests import kinds
from tests.flower.grid import experiment
from tests.small import digits, digits_backbone

NAMES = ("late", "rude")


@pytest.mark.parametrize(
    "cells",
    [
        [["late"], [], ["rude", "late"], None],
        ['["late"]', "[]", "['rude', 'late']", ""],  # as JSON and pandas write them
        ["late", "[]", " rude | late|", " "],
        ["late", "[]", "rude;late", None],
        ["late", "[]", "late, rude", None],
    ],
)
def test_labels_are_read_from_lists_and_from_names_with_a_separator(cells: list[Any]) -> None:
    found = MultiLabel().targets(Cells(cells, 4))
    assert found.classes == NAMES
    assert found.values.tolist() == [[1, 0], [0, 0], [1, 1], [0, 0]]
    assert found.is_known.tolist() == [True, True, True, False]


@pytest.mark.parametrize(
    ("cells", "source", "classes", "names"),
    [
        ([[1, 0, 0], [0, 1, 1.0], [0, 0, 0]], (), (), ("0", "1", "2")),
        ([[1, 0, 0], [0, 1, 1], [0, 0, 0]], (), ("a", "b", "c"), ("a", "b", "c")),
        ([[0], [1, 2], []], ("a", "b", "c"), (), ("a", "b", "c")),
        ([[2], [0, 1], []], ("b", "c", "a"), ("a", "b", "c"), ("a", "b", "c")),
        ([[7], [8, 9], []], (), (), ("7", "8", "9")),
        (["7", "8,9", "[]"], (), (), ("7", "8", "9")),
    ],
)
def test_labels_may_be_numbers(
    cells: list[Any], source: tuple[str, ...], classes: tuple[str, ...], names: tuple[str, ...]
) -> None:
    found = MultiLabel().targets(Cells(cells, 3, source), classes)
    assert found.classes == names
    assert found.values.tolist() == [[1, 0, 0], [0, 1, 1], [0, 0, 0]]


def test_how_the_cells_were_split_is_said() -> None:
    found = MultiLabel().targets(Cells(["a, x|b", "b"], 2, place="column 'y'"))
    assert found.note == "column 'y': labels are split at '|'"
    assert found.classes == ("a, x", "b")


def test_a_name_of_a_class_is_not_split() -> None:
    names = ("Fish, fresh", "Meat")
    cells = ["Fish, fresh", '["Fish, fresh", "Meat"]']
    found = MultiLabel().targets(Cells(cells, 2), names)
    assert found.values.tolist() == [[1, 0], [1, 1]]


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ([["a", "b"], {"a": 1}, None], "holds .'a': 1. in row 2: .* lists of names"),
        ([["a", "b"], [["a"]], None], "in row 2: .* needs lists of names"),
        (["a|b", "[a", "[a]"], "holds '.a.' in row 3"),
        ([["a", "b"], [float("nan")], None], "in row 2"),
        ([["a", "b"], [1], None], "all integers or all text; one of them is 'a'"),
        ([None, "", None], "no row of the training split has labels; .* an empty list"),
        ([["a"], [], ["a"]], "has 1 label; the task 'multi-label' needs two or more"),
        ([[], [], []], "has 0 labels"),
        ([[1, 0], [2, 1], [0, 0]], "holds .0, 0. in row 3, a number twice; write 0 or 1"),
        ([["a", "b"], ["a"], ["c"]], "unknown label 'c' in row 1 of the test rows; allowed: a, b"),
    ],
)
def test_what_is_no_list_of_labels_is_named(cells: list[Any], message: str) -> None:
    with pytest.raises(ft.InputError, match=message):
        MultiLabel().targets(Cells(cells, 2 if cells[2] == ["c"] else 3, place="column 'y'"))


def test_data_classes_name_the_columns_of_an_array() -> None:
    pixels, flags = np.zeros((3, 8, 8), np.uint8), np.array([[1, 0], [1, 1], [0, 0]])
    source = ft.Data.from_arrays(pixels, flags, task=MultiLabel.name, classes=NAMES)
    dataset = source.load(source.config(ft.DataConfig()), None)
    assert dataset.classes == NAMES
    assert np.array_equal(dataset.labels, flags)  # type: ignore[arg-type]
    with pytest.raises(ft.InputError, match=r"2 numbers in each row, and data\.classes names 3"):
        MultiLabel().targets(Cells(flags.tolist(), 3), ("a", "b", "c"))


@pytest.mark.slow
def test_several_columns_are_a_label_each(tmp_path: Path) -> None:
    import pandas as pd

    tokenizer = ft.models.load_tokenizer(ft.ModelConfig("minilm"))
    frame = pd.DataFrame(
        {"text": ["a b", "c", "d e"], "rude": ["no", "no", "Yes"], "late": [1, 0, 1]}
    )
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame.to_json(tmp_path / "t.jsonl", orient="records", lines=True)
    labels = ["rude", "late"]
    sources = [ft.Data.from_pandas(frame, label=labels, task=MultiLabel.name)]
    for name in ("t.csv", "t.jsonl"):
        of_file = ft.Data.from_csv(tmp_path / name, label=labels, task=MultiLabel.name)
        sources.append(of_file)
    for source in sources:
        dataset = source.load(source.config(ft.DataConfig()), tokenizer)
        assert dataset.classes == ("rude", "late")
        assert dataset.batch(np.arange(3))["labels"].tolist() == [[0, 1], [0, 0], [1, 1]]
    frame["late"] = [1, 0, 2]
    with pytest.raises(ft.InputError, match="'late' holds 2; as one of several labels it must"):
        ft.Data.from_pandas(frame, label=labels, task=MultiLabel.name)
    with pytest.raises(ft.InputError, match=r"'classification' reads one column; .* 'multi-label'"):
        ft.DataConfig(label=("rude", "late"))
    wrong = ft.Data.from_csv(tmp_path / "t.csv", label=["rude", "angry"], task=MultiLabel.name)
    with pytest.raises(ft.InputError, match=r"no column 'angry' for data\.label"):
        wrong.load(wrong.config(ft.DataConfig()), tokenizer)


def test_the_threshold_is_the_one_with_the_best_f1() -> None:
    from sklearn.metrics import f1_score

    draw = np.random.default_rng(0)
    targets = (draw.random((40, 3)) < 0.3).astype(int)
    shares = np.clip(0.4 * draw.random((40, 3)) + 0.2 * targets, 0, 1)
    grid = [k / 20 for k in range(1, 20)]
    scores = [f1_score(targets, shares > t, average="micro", zero_division=0) for t in grid]
    best = max(scores)
    task = MultiLabel()
    found = task.chosen(targets, shares)
    assert scores[grid.index(pytest.approx(found))] == best
    assert found != 0.5
    compared = task.tuned(found).compared(targets, shares, (), None)  # type: ignore[arg-type]
    values = {name: one(*compared) for name, one in task.metrics.items()}
    assert values["f1_micro"] == pytest.approx(best)
    assert values["threshold"] == found
    by_label = [f1_score(targets[:, k], shares[:, k] > found) for k in range(3)]
    assert values["f1_macro"] == pytest.approx(np.mean(by_label))
    no_labels = np.zeros((2, 3), int)
    assert task.chosen(no_labels, shares[:2]) == 0.5
    compared = task.compared(no_labels, 0 * shares[:2], (), None)  # type: ignore[arg-type]
    undefined = {name for name, one in task.metrics.items() if np.isnan(one(*compared))}
    assert undefined == {"f1_micro", "f1_macro", "map"}


@pytest.mark.slow
def test_a_client_predicts_the_labels_above_its_own_threshold() -> None:
    """That of its validation rows, which its export has, too."""
    folder = kinds.finished(MultiLabel.name)
    texts, _ = kinds.rows(MultiLabel.name)
    lines = (folder / "run/methods/fedsdg/seed-0/clients.jsonl").read_text().splitlines()
    model = ft.load_model(folder / "run", "fedsdg", "a")
    of_round = [one for one in map(json.loads, lines) if one["round"] == model.trained.round]
    a, b = (one["metrics"]["threshold"] for one in of_round if one["model"] == "personal")
    assert a == b  # of the validation rows, and of the test rows
    for answer in model.predict(texts):
        above = [name for name, share in answer.probabilities.items() if share > a[0]]
        assert list(answer.labels) == above
    export_model(folder / "run", "fedsdg", folder / "threshold", client="a")
    assert json.loads((folder / "threshold/export.json").read_text())["threshold"] == a[0]


def parities() -> Dataset:
    """Three labels for each digit: even, above 4, and a multiple of 3."""
    classes = digits()
    assert isinstance(classes.labels, np.ndarray)
    values = np.stack([classes.labels % 2 == 0, classes.labels > 4, classes.labels % 3 == 0], 1)
    names = ("even", "high", "third")
    return replace(
        classes, task=MultiLabel.name, labels=values.astype(np.uint8), classes=names, digest="three"
    )


def backbone() -> Backbone:
    made = digits_backbone()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        made.model.head = torch.nn.Linear(16, 3)
    return replace(made, objective=MultiLabel())


@pytest.mark.parametrize(
    ("label", "fields", "message"),
    [
        ("fedmd", {}, "fedmd"),
        ("fedavg", {"split": {"clients": 3, "scheme": "dirichlet"}}, "dirichlet"),
        ("fedavg", {"split": {"clients": 3, "shuffled": 0.5}}, "shuffled"),
        ("fedavg", {"attack": {"kind": "label-flip", "clients": [1]}}, "label-flip"),
        ("fedavg", {"evaluate": {"confusion": True}}, "confusion is not for multi-label"),
        ("fedavg", {"evaluate": {"select": "threshold"}}, "unknown metric 'threshold'"),
    ],
)
def test_what_needs_one_class_a_row_is_refused(
    label: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    chosen = experiment(label, {}, **{"split": {"clients": 3}, **fields}, rounds=1)
    with pytest.raises(ft.InputError, match=message):
        ft.run(chosen, tmp_path / "run", data=parities(), backbone=backbone())
