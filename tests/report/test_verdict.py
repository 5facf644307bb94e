"""Verdicts on runs whose results are written by hand."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedtailor.report.comparison import compare
from fedtailor.report.differences import Difference
from fedtailor.report.table import table
from fedtailor.report.verdict import Verdict
from fedtailor.store.read import read_all
from tests.report.written import ALONE, NOISE, K, around, verdict_of, written


def over(found: Verdict, method: str) -> Difference:
    """How far the best method is ahead of ``method``."""
    (one,) = (one for one in found.differences if one.over == method)
    assert one.method == found.best
    return one


def test_a_clear_win(tmp_path: Path) -> None:
    test = {"fedsdg": around(0.6), "fedavg": around(0.55, NOISE[::-1]), "local": ALONE}
    path = written(tmp_path / "run", test)
    found = verdict_of(path)
    assert found.best == "fedsdg"
    assert over(found, "fedavg").reading == "better"
    assert over(found, "fedavg").value == pytest.approx(0.05)
    assert over(found, "fedavg").low < 0.05 < over(found, "fedavg").high
    assert found.text == [
        "fedsdg is best on validation data (60.0 %); on test data it is clearly better than fedavg "
        "and local.",
        "Worse off with fedsdg than alone: 0 of 20 clients.",
        "One seed: another one may turn the order.",
    ]
    command = f"fedtailor predict {tmp_path}/run --method fedsdg --client CLIENT --input FILE"
    assert found.next_step == command
    lines = compare(path).splitlines()
    (row,) = (line.split() for line in lines if line.startswith("fedsdg") and "local" in line)
    shown = ["fedsdg", "local", "+10.0", "+7.3", "to", "+12.6", "better", "0", "of", "20"]
    assert row == shown


def test_a_tie(tmp_path: Path) -> None:
    test = {"fedsdg": around(0.501), "fedavg": ALONE, "local": around(0.49, NOISE[::-1])}
    found = verdict_of(written(tmp_path / "run", test))
    assert over(found, "fedavg").reading == "may be chance"
    assert found.text[0] == (
        "fedsdg is best on validation data (50.1 %); on test data it is not clearly different from "
        "fedavg and local."
    )
    same = verdict_of(written(tmp_path / "same", {"fedsdg": ALONE, "local": ALONE}))
    assert ", as good as local, by the order in the file; on test data" in same.text[0]


def test_the_order_of_a_sum_breaks_no_tie(tmp_path: Path) -> None:
    test = {"fedavg": ALONE, "fedsdg": ALONE, "local": around(0.3), "fedprox": around(0.6)}
    near = around(6 / 7, [10 * x for x in NOISE])
    orders: dict[str, float | list[float]] = {"fedavg": near, "fedsdg": near[::-1]}
    orders |= {"local": sorted(near), "fedprox": sorted(near, reverse=True)}
    assert len({float(np.mean(values)) for values in orders.values()}) > 1
    found = verdict_of(written(tmp_path / "run", test, orders))
    assert found.text[0] == (
        "fedavg is best on validation data (85.7 %), as good as fedsdg, local and fedprox, by the "
        "order in the file; on test data it is clearly better than local, clearly worse than "
        "fedprox, not clearly different from fedsdg."
    )


def test_a_loss(tmp_path: Path) -> None:
    # validation chose fedsdg; test data, which may not choose, put it behind
    test = {"fedsdg": around(0.4), "fedavg": around(0.3), "local": ALONE}
    validation = {"fedsdg": 0.6, "fedavg": 0.3, "local": 0.5}
    found = verdict_of(written(tmp_path / "run", test, validation))
    worst = sorted(range(K), key=lambda k: (NOISE[k], str(k)))[:5]
    assert found.text[:3] == [
        "fedsdg is best on validation data (60.0 %); on test data it is clearly better than "
        "fedavg, clearly worse than local.",
        "Worse off with fedsdg than alone: 20 of 20 clients: "
        f"{', '.join(f'client {k} ({100 * (NOISE[k] - 0.1):+.1f})' for k in worst)} and 15 more.",
        "Clearly worse than training alone: fedavg (-20.0) and fedsdg (-10.0).",
    ]


def test_a_client_that_loses_is_named(tmp_path: Path) -> None:
    names = ["Fallow Hill", *(f"site {k}" for k in range(1, K))]
    test = {"fedsdg": [0.312, *[0.6] * (K - 1)], "local": ALONE}
    found = verdict_of(written(tmp_path / "run", test, names=names))
    assert found.text[1] == (
        "Worse off with fedsdg than alone: 1 of 20 clients: Fallow Hill (-18.8)."
    )


def test_training_alone_may_be_the_best(tmp_path: Path) -> None:
    found = verdict_of(written(tmp_path / "run", {"fedsdg": around(0.4), "local": ALONE}))
    assert (found.best, over(found, "fedsdg").reading) == ("local", "better")
    assert found.text[1] == "Clearly worse than training alone: fedsdg (-10.0)."


def test_of_a_loss_the_lowest_is_best(tmp_path: Path) -> None:
    test = {"fedsdg": around(2.5), "fedavg": around(2.8, NOISE[::-1]), "local": [3.0] * K}
    found = verdict_of(written(tmp_path / "run", test, is_lm=True))
    assert found.best == "fedsdg"
    assert over(found, "fedavg").reading == "better"
    assert over(found, "fedavg").value == pytest.approx(0.3)
    assert over(found, "local").num_worse_off == 0


def test_without_training_alone_it_says_so(tmp_path: Path) -> None:
    found = verdict_of(written(tmp_path / "run", {"fedsdg": around(0.6), "fedavg": ALONE}))
    assert (found.against_alone, found.worse_off) == ([], [])
    said = "Training alone (local) is missing, so who loses against it is unknown."
    assert said in found.text
    only = verdict_of(written(tmp_path / "only", {"fedsdg": around(0.6)}))
    assert (only.best, only.differences) == ("fedsdg", [])
    assert only.text == ["fedsdg is best on validation data (60.0 %).", said]


def test_a_diverged_method_is_not_chosen_and_named(tmp_path: Path) -> None:
    test = {"fedsdg": around(0.9), "fedavg": around(0.6), "local": ALONE}
    found = verdict_of(written(tmp_path / "run", test, diverged=["fedsdg"]))
    assert found.best == "fedavg"
    assert found.text[-1] == "fedsdg diverged with seed 0, so it can't be chosen."
    assert [one.method for one in found.against_alone] == ["fedsdg", "fedavg"]


def test_without_validation_nothing_is_chosen(tmp_path: Path) -> None:
    nothing = dict.fromkeys(("fedsdg", "local"), float("nan"))
    found = verdict_of(written(tmp_path / "run", {"fedsdg": around(0.9), "local": ALONE}, nothing))
    assert (found.best, found.next_step) == (None, "")
    assert found.text[0].startswith("No method has validation results")
    assert [one.method for one in found.against_alone] == ["fedsdg"]


def test_few_clients_have_no_interval(tmp_path: Path) -> None:
    path = written(tmp_path / "run", {"fedsdg": [0.9] * 5, "local": [0.1] * 5})
    found = verdict_of(path)
    assert over(found, "local").reading == "may be chance"
    assert "not clearly different from local" in found.text[0]
    assert "5 clients are too few to tell a difference from chance." in found.text
    assert "too few clients to tell" in compare(path)
    six = verdict_of(written(tmp_path / "six", {"fedsdg": [0.9] * 6, "local": [0.1] * 6}))
    assert over(six, "local").reading == "better"


def test_seeds_divide_the_data_anew_unless_clients_have_names(tmp_path: Path) -> None:
    test = {"fedsdg": around(0.5), "local": ALONE}
    found = verdict_of(written(tmp_path / "numbers", test, seeds=(0, 1, 2)))
    by_number = over(found, "local")
    behind = sum(x < 0 for x in NOISE)
    assert (by_number.num_clients, by_number.num_worse_off) == (3 * K, 3 * behind)
    assert any(" of seed 0 (-9.5)" in sentence for sentence in found.text)
    assert "3 seeds say little of other seeds." in found.text
    names = [f"site {k}" for k in range(K)]
    named = verdict_of(written(tmp_path / "names", test, seeds=(0, 1, 2), names=names))
    by_name = over(named, "local")
    assert (by_name.num_clients, by_name.num_worse_off) == (K, behind)
    assert named.worse_off[0].startswith(f"site {int(np.argmin(NOISE))} (")
    assert by_name.high - by_name.low > by_number.high - by_number.low


def test_runs_with_the_same_clients_share_a_verdict(tmp_path: Path) -> None:
    first = written(tmp_path / "a", {"fedavg": around(0.6), "local": ALONE})
    second = written(tmp_path / "b", {"fedsdg": around(0.7, NOISE[::-1])})
    found = verdict_of(first, second)
    assert found.best == "fedsdg"
    assert over(found, "fedavg").reading == "better"
    assert over(found, "local").value == pytest.approx(0.2)


def test_runs_with_other_clients_have_verdicts_of_their_own(tmp_path: Path) -> None:
    first = written(tmp_path / "a", {"fedavg": around(0.6), "local": ALONE})
    second = written(tmp_path / "b", {"fedsdg": around(0.7), "local": ALONE}, digest="other")
    found = table(read_all([first, second])).verdicts
    assert [one.best for one in found] == ["fedavg", "fedsdg"]
    text = compare([first, second])
    assert f"Verdict: {first}: fedavg is best" in text
    assert f"Verdict: {second}: fedsdg is best" in text


def test_an_unfinished_run_is_judged_by_the_seeds_that_all_methods_have(tmp_path: Path) -> None:
    test = {"fedsdg": around(0.6), "local": ALONE}
    path = written(tmp_path / "run", test, seeds=(0, 1))
    shutil.rmtree(path / "methods/fedsdg/seed-1")
    begun = path / "methods/local/seed-1/commit.json"
    commit = json.loads(begun.read_text())
    begun.write_text(json.dumps(commit | {"finished": False, "rounds": 3}))
    found = verdict_of(path)
    assert found.best == "fedsdg"
    assert not found.left_out
    assert "Training has not ended, so the order may change." in found.text
    assert found.next_step == f"fedtailor run {tmp_path}/run"
    (tmp_path / "deploy.toml").touch()
    assert verdict_of(path).next_step == f"fedtailor deploy run {tmp_path}"
    begun.write_text(json.dumps(commit | {"finished": False, "stopped": True, "rounds": 3}))
    stopped = verdict_of(path)  # by a callback, for good
    assert "Training has not ended, so the order may change." not in stopped.text
    assert {one.num_seeds for one in found.differences} == {1}  # those that chose
    shutil.rmtree(path / "methods/local/seed-1")
    assert "Some methods or seeds have not begun, so the order may change." in verdict_of(path).text


def test_results_that_are_no_numbers_allow_no_claim(tmp_path: Path) -> None:
    test = {"fedsdg": around(0.6), "fedavg": around(0.5), "local": ALONE}
    path = written(tmp_path / "run", test)
    file = path / "methods/fedavg/seed-0/clients.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        line["accuracy"][3] = line["loss"][3] = None
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = verdict_of(path)
    one = over(found, "fedavg")
    assert (one.words, one.num_clients) == ("some results are no numbers", K - 1)
    assert found.left_out["fedavg"] == "has validation results that are not numbers"
    assert "clearly better than local." in found.text[0]


def test_text_and_json_have_the_verdict_and_the_best_first(tmp_path: Path) -> None:
    test = {"local": ALONE, "fedavg": around(0.55), "fedsdg": around(0.6)}
    path = written(tmp_path / "run", test)
    text = compare(path)
    lines = [line.split()[0] for line in text.splitlines()[4:7]]
    assert lines == ["fedsdg", "fedavg", "local"]
    assert text.splitlines()[4].split()[1] == "*60.0"
    assert max(len(line) for line in text.splitlines() if not line.startswith("    ")) <= 120
    (found,) = json.loads(compare(path, as_json=True))["verdicts"]
    assert found["best"] == "fedsdg"
    assert found["text"][0].startswith("fedsdg is best on validation data (60.0 %)")
    assert f"\nNext:\n    {found['next_step']}\n" in text
    assert [row["label"] for row in json.loads(compare(path, as_json=True))["rows"]] == list(test)


MakeRun = Callable[..., Path]


def test_a_run_that_ends_at_its_best_round_may_be_too_short(make_run: MakeRun) -> None:
    fourth_of_six = verdict_of(make_run(methods=("fedavg", "local")))
    assert not any("More rounds" in one for one in fourth_of_six.text)
    short = make_run("short", methods=("fedavg", "local"), rounds=4)
    said = "More rounds may change the order: the last one is the best of fedavg and local."
    assert said in verdict_of(short).text
    experiment = json.loads((short / "experiment.json").read_text())
    for privacy, may_be in (({"epsilon": 8.0}, False), ({"epsilon": 8.0, "noise": 1.0}, True)):
        (short / "experiment.json").write_text(json.dumps(experiment | {"privacy": privacy}))
        assert (said in verdict_of(short).text) == may_be


def test_of_written_runs_the_reported_round_is_judged(make_run: MakeRun) -> None:
    found = verdict_of(make_run(methods=("fedavg", "fedsdg", "local")))
    one = over(found, "fedavg")
    assert found.best == "fedsdg"
    assert one.value == pytest.approx(0.1)  # 0.05 * (10 - 8) for every client
    assert (one.num_clients, one.num_seeds) == (10, 2)


def test_an_attack_is_named_and_a_method_that_learned_nothing(tmp_path: Path) -> None:
    test = {"fedavg": around(0.4), "local": ALONE}
    run = written(tmp_path / "run", test, majority=0.45)
    file = run / "experiment.json"
    attack = {"kind": "sign-flip", "fraction": 0.2, "strength": 5.0}
    file.write_text(json.dumps({**json.loads(file.read_text()), "attack": attack}))
    text = verdict_of(run).text
    for said in (
        "An attack was simulated (sign-flip, 20\u00a0%, strength 5)",
        "fedavg did not learn",
    ):
        assert any(line.startswith(said) for line in text)


def test_rounds_without_an_upload_are_counted(tmp_path: Path) -> None:
    run = written(tmp_path / "run", {"fedavg": around(0.4), "local": ALONE})
    folder = run / "methods/fedavg/seed-0"
    line = json.loads((folder / "history.jsonl").read_text())
    empty = line | {"cohort": [], "train_loss": None, "losses": [], "steps": [], "trained": 3}
    text = json.dumps(empty) + "\n"
    (folder / "history.jsonl").write_text(text)
    commit = json.loads((folder / "commit.json").read_text())
    commit["bytes"]["history"] = len(text)
    (folder / "commit.json").write_text(json.dumps(commit))
    said = "fedavg could not aggregate in 1 of 1 rounds (run.log says why)."
    assert said in verdict_of(run).text
