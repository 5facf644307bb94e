"""What the charts show, against the numbers that the run directory was written with."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedtailor.report.charts import content as charts
from fedtailor.report.charts import specs
from fedtailor.report.charts.content import content, groups
from fedtailor.report.costs import front
from fedtailor.report.select import entries
from fedtailor.report.table import table
from fedtailor.store.read import read_all
from tests.report.conftest import TEST, K, correct

MakeRun = Callable[..., Path]


def content_of(*paths: Path) -> dict:
    runs = read_all(paths)
    found = entries(runs)
    shown = content(found, table(runs), groups(found))
    json.dumps(shown, allow_nan=False)
    return shown


def test_every_client_has_its_result_at_the_reported_round(make_run: MakeRun) -> None:
    shown = content_of(make_run(methods=("fedavg", "local")))
    rows = shown["results"]
    assert shown["methods"] == ["fedavg", "local"]
    assert len(rows["value"]) == 2 * 2 * 5  # methods, seeds, clients with test examples
    for method, group, client, value in zip(*rows.values(), strict=True):
        of = correct(shown["methods"][method], group, "test", 4, "personal")[client]
        assert value == pytest.approx(100 * of)
    assert [group["title"] for group in shown["groups"]] == ["seed 0", "seed 1"]
    assert shown["groups"][0]["test"] == TEST


def test_curves_are_means_over_clients_and_seeds(make_run: MakeRun) -> None:
    curves = content_of(make_run(methods=("fedavg",)))["curves"]
    at = [
        k
        for k, (split, when) in enumerate(zip(curves["split"], curves["round"], strict=True))
        if (split, when) == ("validation", 4)
    ]
    means = [100 * np.mean(correct("fedavg", s, "validation", 4, "personal")) for s in (0, 1)]
    (k,) = at
    assert curves["value"][k] == pytest.approx(np.mean(means))
    assert curves["std"][k] == pytest.approx(np.std(means, ddof=1), abs=1e-3)
    assert curves["reported"][k] == 2  # both seeds report round 4


def test_one_client_has_a_curve_with_each_method(make_run: MakeRun) -> None:
    curves = content_of(make_run(methods=("fedavg",), seeds=(0,)))["clientCurves"]
    (curve,) = curves
    assert curve["rounds"] == [0, 2, 4, 6, 8]
    expected = [correct("fedavg", 0, "test", when, "personal") for when in curve["rounds"]]
    for values, of in zip(curve["values"], expected, strict=True):
        assert values == [None if x is None else pytest.approx(100 * x) for x in of]


def test_runs_with_the_same_clients_share_their_groups(make_run: MakeRun) -> None:
    same = content_of(make_run("a", methods=("fedavg",)), make_run("b", methods=("local",)))
    assert len(same["groups"]) == 2
    other = content_of(make_run("c"), make_run("d", digest="d2"))
    assert len(other["groups"]) == 4
    assert other["groups"][0]["title"].endswith("c, seed 0")  # two runs have one name


def test_of_many_clients_some_are_shown(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "MAX_CLIENTS", 3)
    shown = content_of(make_run(methods=("fedavg",), seeds=(0,)))
    assert shown["groups"][0]["names"] == ["0", "2", "5"]
    assert shown["groups"][0]["all"] == K
    assert set(shown["results"]["client"]) == {0, 1, 2}
    assert shown["boxes"]["clients"] == [5]  # the boxes count all


def test_the_front_has_what_nothing_beats_in_both() -> None:
    points = [(0, 0.5), (1, 0.4), (2, 0.8), (2, 0.8), (3, 0.7), (4, 0.9)]
    assert front(points, higher_is_better=True) == [True, False, True, True, False, True]
    losses = [(0, 2.0), (1, 2.5), (2, 1.0)]
    assert front(losses, higher_is_better=False) == [True, False, True]


def test_costs_are_those_until_the_reported_round(make_run: MakeRun) -> None:
    costs = content_of(make_run(methods=("fedavg", "local")))["costs"]
    # 4 rounds of 2 clients, 4000 bytes down and 2000 up, over 6 clients
    assert costs["bytes"] == [pytest.approx(4 * 2 * 6000 / K), 0]
    assert (
        costs["flops"] == [pytest.approx(4 * 3 * 6000 / K)] * 2
    )  # 3 steps a round, of both clients
    assert costs["cpu"] == [12, 12]
    assert costs["seconds"] == [16, 16]


def test_simulated_rounds_cost_what_all_who_trained_have_done(make_run: MakeRun) -> None:
    out = make_run(methods=("fedavg",), seeds=(0,))
    folder = out / "methods/fedavg/seed-0"
    commit = json.loads((folder / "commit.json").read_text())
    log = (folder / "history.jsonl").read_bytes()[: commit["bytes"]["history"]].splitlines()
    more = {"trained": 4, "trained_steps": 5, "simulated_seconds": 2.5}
    text = "".join(json.dumps(json.loads(line) | more) + "\n" for line in log)
    (folder / "history.jsonl").write_text(text)
    commit["bytes"]["history"] = len(text)
    (folder / "commit.json").write_text(json.dumps(commit))
    costs = content_of(out)["costs"]
    assert costs["simulated"] == [4 * 2.5]
    assert costs["flops"] == [pytest.approx(4 * 5 * 6000 / K)]
    (row,) = table(read_all([out])).rows
    assert row.simulated_seconds == 8 * 2.5
    assert row.bytes_down == 8000 / 4


def test_language_models_have_losses(make_run: MakeRun) -> None:
    shown = content_of(make_run(is_lm=True, seeds=(0,), methods=("fedavg",)))
    assert shown["metric"] == {
        "name": "loss", "axis": "loss (nats)", "isPercentage": False, "higher": False,
    }  # fmt: skip
    assert shown["groups"][0]["labels"] is None
    assert min(shown["results"]["value"]) > 1


def test_a_linear_axis_of_costs_begins_at_0() -> None:
    def scale(ticks: list[float]) -> dict:
        chart = specs.pareto(["fedavg", "local"], "accuracy", "seconds", ticks)
        return chart["layer"][1]["encoding"]["x"]["scale"]

    assert scale([]) == {"zero": True}
    assert scale([1.0, 10.0])["type"] == "symlog"
