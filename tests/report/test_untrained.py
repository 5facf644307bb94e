"""Clients that never trained, whose results stand apart, and training alone that was unequal."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import fedtailor as ft
from fedtailor.report.comparison import against, compare
from fedtailor.report.select import entries
from fedtailor.report.table import table
from fedtailor.report.untrained import num_trainings, unequal_turns, untrained_of
from fedtailor.store.read import read
from tests.report.written import ALONE, K, around, verdict_of, written
from tests.small import digits, digits_backbone

SOME = [0.8] * 8 + [0.3] * 12  # of a method with which the first eight clients trained


@pytest.mark.slow
def test_a_real_run_counts_who_never_trained_with_a_private_part(tmp_path: Path) -> None:
    """One of five clients in each of two rounds: FedPer's heads of three clients and more are as
    they began, and so are FedMerge's weights of them at the server. Training alone trains each
    client once, in as many rounds, and one model for all has no private part."""
    methods = {"fedper": ft.FedPer(), "fedmerge": ft.FedMerge(models=2), "fedavg": ft.FedAvg()}
    experiment = ft.Experiment(
        methods={**methods, "local": ft.Local()},
        rounds=2,
        split=ft.SplitConfig(5, "dirichlet", alpha=1.0),
        cohort=ft.CohortConfig(size=1),
        local=ft.LocalConfig(steps=1),
        engine=ft.EngineConfig("sequential"),
    )
    done = ft.run(experiment, tmp_path / "run", data=digits(), backbone=digits_backbone())
    run = read(done.path)
    found = {entry.label: entry for entry in entries([run])}
    assert num_trainings(found["local"].trials[0], 2) == dict.fromkeys(range(5), 1)
    assert unequal_turns(found["local"]) is None
    shares = {}
    for label in ("fedper", "fedmerge"):
        one = untrained_of(found[label], "accuracy")
        assert one is not None
        shares[label] = one.share
    assert {*shares.values()} <= {"3 of 5 clients", "4 of 5 clients", "5 of 5 clients"}
    assert untrained_of(found["fedavg"], "accuracy") is None
    assert done.best.untrained == shares
    assert {row.label for row in table([run]).rows if row.untrained} == shares.keys()


def test_clients_that_never_trained_stand_apart_everywhere(tmp_path: Path) -> None:
    test = {"fedper": SOME, "local": ALONE}
    path = written(
        tmp_path / "run", test, {"fedper": 0.9, "local": 0.5}, trained={"fedper": range(8)}
    )
    found = verdict_of(path)
    said = "fedper: 12 of 20 clients never trained: accuracy 30.0 %, the others 80.0 %"
    assert (
        "12 of 20 clients have not trained with both fedper and local; over the others fedper is "
        "ahead by +30.0 (+30.0 to +30.0)."
    ) in found.text
    assert f"- {said}" in compare([path])
    row = json.loads(compare([path], as_json=True))["rows"][0]
    assert row["untrained"] == {
        "count": 12,
        "clients": 20,
        "seeds": 1,
        "mean": pytest.approx(0.3),
        "others": pytest.approx(0.8),
    }
    assert said in against([path], "local")
    (one,) = json.loads(against([path], "local", as_json=True))
    assert (one["num_untrained"], one["trained"]["num_clients"]) == (12, 8)
    assert one["trained"]["value"] == pytest.approx(0.3)


def test_training_alone_that_was_unequal_is_no_measure(tmp_path: Path) -> None:
    """A run of a version that drew cohorts for it."""
    local = [0.7] * 8 + [0.3] * 12
    test = {"fedavg": around(0.9), "local": local}
    path = written(tmp_path / "run", test, trained={"local": range(8)})
    found = verdict_of(path)
    assert (found.differences, found.against_alone, found.worse_off) == ([], [], [])
    said = "local is no fair measure of training alone: its clients trained 0 to 1 times each"
    assert f"{said}, so who loses against it is unknown." in found.text
    assert not any("better than" in text for text in found.text)
    text = against([path], "local")
    assert said in text
    assert "trained unequally" in text
    assert "12 of 20 clients never trained: accuracy 30.0 %, the others 70.0 %" in text


def test_clients_are_counted_over_seeds(tmp_path: Path) -> None:
    trained = {"fedper": range(8)}
    path = written(
        tmp_path / "run", {"fedper": SOME, "local": ALONE}, seeds=(0, 1), trained=trained
    )
    (one, _) = (row.untrained for row in table([read(path)]).rows)
    assert one is not None
    assert one.share == "24 of 40 clients of 2 seeds"
    one = replace(one, others=None)
    assert one.words("loss") == f"{one.share} never trained: loss 0.300"
    nobody = written(tmp_path / "b", {"fedper": SOME, "local": ALONE}, trained={"fedper": []})
    (difference,) = json.loads(against([nobody], "local", as_json=True))
    assert (difference["num_untrained"], difference["trained"]) == (K, None)
    assert "No client has trained with both fedper and local" in against([nobody], "local")
