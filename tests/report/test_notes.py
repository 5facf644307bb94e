"""The notes below a comparison."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from fedtailor.report.cells import ranked, text_tables
from fedtailor.report.comparison import compare
from fedtailor.report.notes import caption
from fedtailor.report.table import table
from fedtailor.store.read import read_all
from tests.report.conftest import row_of

MakeRun = Callable[..., Path]


def test_unfinished_methods_are_marked(make_run: MakeRun) -> None:
    path = make_run(done=3)
    shutil.rmtree(path / "methods/fedsdg/seed-1")
    words = " ".join(compare([path]).split())
    assert "fedavg (round 3 of 8)" in words
    assert f"Unfinished: fedavg, seed 0: round 3 of 8 ({path})" in words
    assert f"Not begun in {path}: fedsdg, seed 1" in words
    assert row_of([path], "fedavg")["personal_model"]["rounds"] == [2, 2]


def test_runs_that_are_not_comparable_are_noted(make_run: MakeRun) -> None:
    first = make_run("a")
    second = make_run("b", digest="d2", rounds=6, epochs=2)
    notes = json.loads(compare([first, second], as_json=True))["notes"]
    assert notes[0].startswith("Not comparable: the partitions of seed 0 differ: d1-000000000")
    assert notes[2] == (
        f"Different budgets: rounds 8 ({first}), 6 ({second}); "
        f"local.epochs 1 ({first}), 2 ({second})"
    )
    third = make_run("c", seeds=(0, 2))
    notes = json.loads(compare([first, third], as_json=True))["notes"]
    assert notes[0] == f"Different seeds: [0, 1] ({first}), [0, 2] ({third})"


def test_runs_with_other_clients_are_ranked_and_starred_apart(make_run: MakeRun) -> None:
    runs = [make_run("a", seeds=(0,)), make_run("b", seeds=(0,), digest="d2")]
    (first, *_) = text_tables(compared := table(read_all(runs)))
    groups = [row.group for row in ranked(compared)]
    assert groups == sorted(groups)
    assert set(groups) == {0, 1}
    assert "runs with other clients are ranked apart" in first.title
    for column in {column for _, column in first.best}:
        assert {groups[row] for row, at in first.best if at == column} == {0, 1}


def test_equal_runs_have_no_warning(make_run: MakeRun) -> None:
    notes = json.loads(compare([make_run("a"), make_run("b")], as_json=True))["notes"]
    assert notes == ["Left out because they have no test examples: 1 client"]


def test_what_the_server_saw_is_noted(make_run: MakeRun) -> None:
    path = make_run()
    experiment = json.loads((path / "experiment.json").read_text())
    experiment["secure_aggregation"] = {"threshold": 0.7}
    (path / "experiment.json").write_text(json.dumps(experiment))
    notes = json.loads(compare([path], as_json=True))["notes"]
    assert f"Secure aggregation in {path}: the server saw sums of updates alone" in notes


def test_the_caption_says_which_round_which_clients_and_how_many_seeds(make_run: MakeRun) -> None:
    runs = read_all([make_run("a"), make_run("b", seeds=(0,))])
    words = " ".join(caption(runs, "accuracy", by_validation=True))
    assert "highest mean validation accuracy over clients" in words
    assert "Results of 6 clients and 1 to 2 seeds: " in words
    assert "±" in words
    assert "perplexity" not in words
    language = read_all([make_run("c", seeds=(0,), is_lm=True)])
    last = " ".join(caption(language, "loss", by_validation=False))
    assert "the last evaluated one" in last
    assert "Results of 6 clients and 1 seed: " in last
    assert "±" not in last
    assert "ppl: the perplexity" in last
