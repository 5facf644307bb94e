"""The majority class beside the methods, and who is not better than it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedtailor.report.comparison import compare
from tests.report.conftest import TEST, hold

MakeRun = Callable[..., Path]
CORRECT = [10, 5, 15, 0, 5, 15]  # half of each client's test examples


def held(path: Path, correct: list[int]) -> Path:
    for seed in (0, 1):
        hold(path, seed, majority=[0] * 6, majority_correct=correct)
    return path


def test_its_row_is_on_the_methods_test_examples(make_run: MakeRun) -> None:
    path = held(make_run(methods=("fedavg",)), CORRECT)
    comparison = json.loads(compare([path], as_json=True))
    (majority,) = comparison["majority_class"]
    assert majority["mean"] == {"mean": 0.5, "std": 0.0}
    assert majority["worst"]["mean"] == 0.5
    result = comparison["rows"][0]["personal_model"]
    assert result["majority"]["mean"] == 0.5
    assert result["did_not_learn"] is False
    line = next(line for line in compare([path]).splitlines() if line.startswith("majority class "))
    assert line.split()[2:] == ["50.0±0.0", "50.0±0.0", "0.0", "50.0", "50.0", *"----"]


@pytest.mark.parametrize(("above", "marked"), [(0.0, True), (0.001, False)])
def test_a_method_that_is_not_above_it_is_marked(
    make_run: MakeRun, above: float, marked: bool
) -> None:
    path = make_run(methods=("fedavg", "fedsdg"))
    mean = json.loads(compare([path], as_json=True))["rows"][0]["personal_model"]["mean"]["mean"]
    sizes = [10_000 * size for size in TEST]
    for seed in (0, 1):
        correct = [round((mean - above) * size) for size in sizes]
        hold(path, seed, majority=[0] * 6, majority_correct=correct, test=sizes)
    rows = json.loads(compare([path], as_json=True))["rows"]
    assert [row["personal_model"]["did_not_learn"] for row in rows] == [marked, False]
    text = compare([path])
    assert ("fedavg (did not learn)" in text) is marked
    assert "fedsdg (did not learn)" not in text
    assert ("- fedavg did not learn: no better than" in text) is marked
    assert "is not above it is marked" in " ".join(text.split())
    assert max(len(x) for x in text.splitlines() if not x.startswith("    ")) <= 120


@pytest.mark.slow
def test_it_is_left_out_where_it_is_unknown(make_run: MakeRun) -> None:
    for path in (make_run("a"), make_run("b", is_lm=True), held(make_run("c"), [-1, *CORRECT[1:]])):
        assert "majority" not in compare([path])
        assert json.loads(compare([path], as_json=True))["majority_class"] == []


@pytest.mark.slow
def test_runs_with_the_same_one_share_a_row(make_run: MakeRun) -> None:
    same = [held(make_run(name), CORRECT) for name in ("a", "b")]
    other = held(make_run("c"), (np.array(CORRECT) // 5).tolist())
    assert compare(same).count("majority class  ") == 1
    rows = json.loads(compare([*same, other], as_json=True))["majority_class"]
    assert [row["run"] for row in rows] == [str(same[0]), str(other)]
    file = other / "experiment.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "name": "sites"}))
    text = compare([*same, other])
    assert "majority class (sites) " in text
    assert "fedsdg (sites) " in text
