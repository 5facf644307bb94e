"""Any number of labels an example: how they are read, scored and predicted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fedtailor as ft
from fedtailor.objectives import MultiLabel
from fedtailor.objectives.cells import Cells

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
        ([["a", "b"], {"a": 1}, None], "holds .'a': 1. in row 2; .* lists of names"),
        ([["a", "b"], [["a"]], None], "in row 2; .* needs lists of names"),
        (["a|b", "[a", "[a]"], "holds '.a.' in row 3"),
        ([["a", "b"], [float("nan")], None], "in row 2"),
        ([["a", "b"], [1], None], "all integers or all text; one of them is 'a'"),
        ([None, "", None], "no row of the training split has labels; .* an empty list"),
        ([["a"], [], ["a"]], "has 1 label; the task 'multi-label' needs two or more"),
        ([[], [], []], "has 0 labels"),
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
