"""Labels of a comparison's rows, and the round whose results they show."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from fedtailor.errors import InputError
from fedtailor.report.comparison import compare
from fedtailor.store.metrics import summary
from fedtailor.store.read import Trial, read
from fedtailor.store.selection import by_round, headline, select_round
from tests.report.conftest import row_of

MakeRun = Callable[..., Path]
Expected = Callable[[str, int, str], NDArray[np.float64]]


def test_results_are_those_of_the_round_chosen_on_validation(
    make_run: MakeRun, expected: Expected
) -> None:
    row = row_of([make_run()], "fedsdg")
    x, n = expected("fedsdg", 4, "personal"), np.array([20, 10, 30, 10, 30])
    found = row["personal_model"]
    assert found["rounds"] == [4, 4]
    assert found["mean"]["mean"] == pytest.approx(x.mean())
    assert found["mean"]["std"] == pytest.approx(x.mean(axis=1).std(ddof=1))
    assert found["weighted"]["mean"] == pytest.approx(np.mean(x @ n / n.sum()))
    assert found["std"]["mean"] == pytest.approx(x.std(axis=1).mean())
    assert found["worst"]["mean"] == pytest.approx(x.min(axis=1).mean())
    assert found["bottom_decile"] == found["worst"]  # five clients: element 5 // 10
    assert (found["clients"], found["without_examples"]) == ([5, 5], [1, 1])
    shared = row["global_model"]
    assert shared["mean"]["mean"] == pytest.approx(expected("fedsdg", 4, "global").mean())


def test_labels_in_two_runs_get_the_runs_name(make_run: MakeRun) -> None:
    first = make_run("a", name="one", methods=("fedavg", "local"))
    second = make_run("b", name="two", methods=("fedavg",))
    rows = json.loads(compare([first, second], as_json=True))["rows"]
    assert [row["label"] for row in rows] == ["fedavg (one)", "local", "fedavg (two)"]
    same = make_run("c", name="one", methods=("fedavg",))
    rows = json.loads(compare([first, same], as_json=True))["rows"]
    assert rows[-1]["label"] == f"fedavg ({same.name})"


def trial_of(run: Path, label: str = "fedavg", seed: int = 1) -> Trial:
    (found,) = (t for t in read(run).trials if (t.label, t.seed) == (label, seed))
    return found


def test_validation_selects_the_round_and_test_is_reported_there(
    make_run: MakeRun, expected: Expected
) -> None:
    trial = trial_of(make_run())
    selected = select_round(trial, "personal", "accuracy")
    assert selected is not None
    assert (selected.round, selected.by_validation) == (4, True)  # test rises until round 8
    assert (selected.test.split, selected.test.round) == ("test", 4)
    result = 100 * expected("fedavg", 4, "personal")[1]
    words = f"accuracy {result.mean():.1f}, worst client {result.min():.1f} (round 4)"
    assert headline(trial, "accuracy") == words
    local = trial_of(make_run("second", methods=("local",)), "local")
    assert select_round(local, "global", "accuracy") is None


def test_evaluations_without_examples_are_left_out(make_run: MakeRun) -> None:
    trial = trial_of(make_run())
    assert list(by_round(trial, "global", "test")) == [0, 2, 4, 6, 8]
    nobody = [0] * 6
    empty = [
        replace(e, num_examples=nobody) if e.round == 6 or e.split == "validation" else e
        for e in trial.evaluations
    ]
    left = replace(trial, evaluations=empty)
    assert list(by_round(left, "global", "test")) == [0, 2, 4, 8]
    selected = select_round(left, "global", "accuracy")
    assert selected is not None
    assert (selected.round, selected.by_validation) == (8, False)  # the last one
    never = replace(trial, evaluations=[])
    assert select_round(never, "personal", "accuracy") is None
    assert headline(never, "accuracy") == ""
    nothing = [replace(e, metrics={"auc": [None] * 6}) for e in trial.evaluations]
    said = headline(replace(trial, evaluations=nothing), "auc")
    assert said == "auc -, worst client - (round 8)"


def test_another_metric_is_shown_at_the_same_round_and_may_choose_it(
    make_run: MakeRun, expected: Expected
) -> None:
    """The made-up AUC is best where accuracy is worst: at round 0."""
    by_accuracy = make_run("a", with_auc=True)
    row = row_of([by_accuracy], "fedsdg")["personal_model"]
    chosen = 1 - np.delete(expected("fedsdg", 4, "personal"), 2, axis=1)  # of clients 0, 1, 4, 5
    assert row["metrics"]["auc"]["mean"] == pytest.approx(chosen.mean())
    assert (row["clients"], row["metric_clients"]["auc"]) == ([5, 5], [4, 4])
    shown = json.loads(compare([by_accuracy], as_json=True, metric="auc"))
    assert shown["metric"] == "auc"
    result = next(r for r in shown["rows"] if r["label"] == "fedsdg")["personal_model"]
    assert result["rounds"] == row["rounds"] == [4, 4]
    assert result["mean"]["mean"] == pytest.approx(chosen.mean())
    assert result["worst"]["mean"] == pytest.approx(chosen.min(axis=1).mean())
    by_auc = make_run("b", with_auc=True, select="auc")
    table = json.loads(compare([by_auc], as_json=True))
    assert table["metric"] == "auc"
    assert [r["personal_model"]["rounds"] for r in table["rows"]] == [[0, 0], [0, 0]]
    assert "the highest mean validation auc over clients" in " ".join(table["caption"])
    assert "auc is undefined for up to 1 of the clients" in table["notes"][-1]


def test_a_metric_that_the_run_lacks_is_named(make_run: MakeRun) -> None:
    message = r"in the runs \(evaluate.metrics names .*\); they have: accuracy, auc, loss"
    with pytest.raises(InputError, match=message):
        compare([make_run(with_auc=True)], metric="macro_f1")


def test_a_metric_that_no_client_has_is_not_a_number(make_run: MakeRun) -> None:
    trial = read(make_run(with_auc=True)).trials[0]
    alone = replace(trial.evaluations[0], metrics={"auc": [None] * 6})
    assert np.isnan(summary(alone, "auc").mean)
