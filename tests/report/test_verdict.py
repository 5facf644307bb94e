"""Verdicts on runs whose results are written by hand."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedtailor.report.comparison import compare
from fedtailor.report.table import table
from fedtailor.store.read import read_all
from tests.report.written import ALONE, NOISE, K, around, verdict_of, written


def test_a_clear_win(tmp_path: Path) -> None:
    test = {"fedsdg": around(0.6), "fedavg": around(0.55, NOISE[::-1]), "local": ALONE}
    found = verdict_of(written(tmp_path / "run", test, sent={"fedsdg": 3000, "fedavg": 1000}))
    assert found.best == "fedsdg"
    assert found.baseline is not None
    assert (found.baseline.over, found.baseline.reading) == ("fedavg", "better")
    assert found.baseline.value == pytest.approx(0.05)
    assert found.baseline.low < 0.05 < found.baseline.high
    assert found.text == (
        "fedsdg is best on validation data (60.0 %).",
        "On test data its accuracy is 10.0 points better than with training alone (95 % interval "
        "7.3 to 12.6).",
        "Its accuracy is 5.0 points better than with fedavg, the next best on validation data "
        "(95 % interval 1.9 to 8.2).",
        "With fedsdg none of 20 clients does worse than alone.",
        "fedsdg sends and receives 6 kB per client and round, and its training took 10 s of "
        "processor time.",
        "The intervals cover 20 clients of one seed; with another seed it may turn out otherwise.",
    )
    assert found.next_step == (
        f"Take fedsdg: fedtailor predict {tmp_path}/run --method fedsdg --client CLIENT --input "
        "FILE"
    )


def test_one_model_for_all_is_no_personal_one(tmp_path: Path) -> None:
    test = {"fedavg": around(0.6), "local": ALONE}
    found = verdict_of(written(tmp_path / "run", test, one_model=["fedavg"]))
    assert found.text[1] == (
        "With fedavg all clients use one model; no part of it is fitted to one client."
    )
    assert found.next_step == (
        f"Take fedavg, one model for all: fedtailor predict {tmp_path}/run --method fedavg --input "
        "FILE"
    )


def test_a_tie(tmp_path: Path) -> None:
    test = {"fedsdg": around(0.501), "fedavg": ALONE, "local": around(0.49, NOISE[::-1])}
    found = verdict_of(written(tmp_path / "run", test))
    assert found.baseline is not None
    assert found.baseline.reading == "may be chance"
    assert found.text[0] == "fedsdg is best on validation data (50.1 %)."
    assert found.text[1:3] == (
        "On test data its accuracy is 1.1 points better than with training alone; that may be "
        "chance (95 % interval 2.0 worse to 4.3 better).",
        "Its accuracy is 0.1 points better than with fedavg, the next best on validation data; "
        "that may be chance (95 % interval 2.6 worse to 2.7 better).",
    )
    assert found.next_step == (
        "Whether fedsdg is better than training alone is open. More test examples narrow the "
        f"interval, and so do more seeds: fedtailor run {tmp_path}/run --set 'seeds=[0,1,2]' Until "
        f"then take fedsdg: fedtailor predict {tmp_path}/run --method fedsdg --client CLIENT "
        "--input FILE"
    )


def test_without_processor_seconds_those_on_the_clock_are_named(tmp_path: Path) -> None:
    test = {"fedsdg": around(0.6), "local": ALONE}
    found = verdict_of(
        written(tmp_path / "run", test, sent={"fedsdg": 3000}, has_cpu_seconds=False)
    )
    assert found.text[3] == ("fedsdg sends and receives 6 kB per client and round, and took 5.0 s.")


def test_methods_that_validation_data_cannot_tell_apart(tmp_path: Path) -> None:
    test = {"fedsdg": around(0.6), "fedavg": ALONE, "local": around(0.3)}
    near: list[float] = around(0.505, [10 * x for x in NOISE])
    validation: dict[str, float | list[float]] = {"fedsdg": 0.5, "fedavg": near, "local": 0.2}
    found = verdict_of(written(tmp_path / "run", test, validation))
    assert (found.best, found.ties) == ("fedavg", ("fedsdg",))
    assert found.text[0] == (
        "fedavg is best on validation data (50.5 %); these data alone can't tell it from fedsdg "
        "(50.0 %)."
    )
    assert "10.0 points worse than with fedsdg, the next best" in found.text[2]


def test_the_order_of_a_sum_breaks_no_tie(tmp_path: Path) -> None:
    test = {"fedavg": ALONE, "fedsdg": ALONE, "local": around(0.3), "fedprox": around(0.6)}
    near = around(6 / 7, [10 * x for x in NOISE])
    orders: dict[str, float | list[float]] = {"fedavg": near, "fedsdg": near[::-1]}
    orders |= {"local": sorted(near), "fedprox": sorted(near, reverse=True)}
    assert len({float(np.mean(values)) for values in orders.values()}) > 1
    found = verdict_of(written(tmp_path / "run", test, orders))
    assert found.text[0] == (
        "fedavg is best on validation data (85.7 %); these data alone can't tell it from fedsdg "
        "(85.7 %), local (85.7 %) and fedprox (85.7 %)."
    )
    assert "10.0 points worse than with fedprox, the next best on validation" in found.text[2]


def test_a_loss(tmp_path: Path) -> None:
    # validation chose fedsdg; test data, which may not choose, put it behind
    test = {"fedsdg": around(0.4), "fedavg": around(0.3), "local": ALONE}
    validation = {"fedsdg": 0.6, "fedavg": 0.3, "local": 0.5}
    found = verdict_of(written(tmp_path / "run", test, validation))
    assert found.best == "fedsdg"
    assert found.text[1] == (
        "On test data its accuracy is 10.0 points worse than with training alone (95 % interval "
        "7.4 to 12.7)."
    )
    worst = sorted(range(K), key=lambda k: (NOISE[k], str(k)))[:5]
    assert found.text[2] == (
        "With fedsdg 20 of 20 clients do worse than alone: "
        f"{', '.join(f'client {k} ({100 * (NOISE[k] - 0.1):+.1f})' for k in worst)} and 15 more."
    )
    assert found.text[3] == "Worse than training alone: fedavg (-20.0)."
    assert found.next_step.startswith("Validation and test data disagree on fedsdg, so don't rely")


def test_a_client_that_loses_is_named(tmp_path: Path) -> None:
    names = ["Fallow Hill", *(f"site {k}" for k in range(1, K))]
    test = {"fedsdg": [0.312, *[0.6] * (K - 1)], "local": ALONE}
    found = verdict_of(written(tmp_path / "run", test, names=names))
    assert found.text[2] == (
        "With fedsdg 1 of 20 clients does worse than alone: Fallow Hill (-18.8)."
    )


def test_training_alone_may_be_the_best(tmp_path: Path) -> None:
    found = verdict_of(written(tmp_path / "run", {"fedsdg": around(0.4), "local": ALONE}))
    assert found.alone is None
    assert found.text[0] == ("Training alone (local) is best on validation data (50.0 %).")
    assert "its accuracy is 10.0 points better than with fedsdg" in found.text[1]
    assert found.next_step.startswith("Train alone, as far as these data go: fedtailor predict ")
    assert "Worse than training alone: fedsdg (-10.0)." in found.text
    assert "local sends nothing, and its training took 4.0 s of processor time." in found.text


def test_of_a_loss_the_lowest_is_best(tmp_path: Path) -> None:
    test = {"fedsdg": around(2.5), "fedavg": around(2.8, NOISE[::-1]), "local": [3.0] * K}
    found = verdict_of(written(tmp_path / "run", test, is_lm=True))
    assert found.best == "fedsdg"
    assert found.baseline is not None
    assert (found.baseline.over, found.baseline.reading) == ("fedavg", "better")
    assert found.baseline.value == pytest.approx(0.3)
    assert found.alone is not None
    assert found.alone.num_worse_off == 0
    assert "Its loss is 0.300 nats better than with fedavg" in found.text[2]


def test_without_training_alone_it_says_so(tmp_path: Path) -> None:
    found = verdict_of(written(tmp_path / "run", {"fedsdg": around(0.6), "fedavg": ALONE}))
    assert found.alone is None
    assert found.worse_off == ()
    assert (
        "Training alone (local) is not among the methods, so who loses against it is unknown."
        in found.text
    )


def test_one_method_has_nothing_to_be_compared_with(tmp_path: Path) -> None:
    found = verdict_of(written(tmp_path / "run", {"fedsdg": around(0.6)}))
    assert (found.best, found.baseline, found.alone) == ("fedsdg", None, None)
    assert found.text == (
        "fedsdg is the only method, so there is nothing to compare it with.",
        "fedsdg sends and receives 2 kB per client and round, and its training took 6.0 s of "
        "processor time.",
    )
    assert found.next_step.startswith("Add training alone to the experiment ([methods.local])")


def test_a_diverged_method_is_not_chosen_and_named(tmp_path: Path) -> None:
    test = {"fedsdg": around(0.9), "fedavg": around(0.6), "local": ALONE}
    found = verdict_of(written(tmp_path / "run", test, diverged=["fedsdg"]))
    assert found.best == "fedavg"
    assert found.text[-1] == "Not in the choice: fedsdg diverged with seed 0."
    assert [one.method for one in found.against_alone] == ["fedsdg", "fedavg"]


def test_without_validation_nothing_is_chosen(tmp_path: Path) -> None:
    nothing = dict.fromkeys(("fedsdg", "local"), float("nan"))
    found = verdict_of(written(tmp_path / "run", {"fedsdg": around(0.9), "local": ALONE}, nothing))
    assert found.best is None
    assert found.text[0].startswith("No method has validation results")


def test_few_clients_have_no_interval(tmp_path: Path) -> None:
    found = verdict_of(written(tmp_path / "run", {"fedsdg": [0.9] * 5, "local": [0.1] * 5}))
    assert found.alone is not None
    assert found.alone.reading == "may be chance"
    assert found.text[1] == (
        "On test data its accuracy is 80.0 points better than with training alone; 5 clients are "
        "too few to tell whether that is chance."
    )
    test = {"fedsdg": [0.9] * 5, "local": [0.8] * 5, "ditto": [0.1] * 5}
    few = verdict_of(written(tmp_path / "few", test, majority=0.3))
    assert few.text[0] == (  # ditto has not learned, so it is no tie
        "fedsdg is best on validation data (90.0 %); these data alone can't tell it from local "
        "(80.0 %)."
    )
    six = verdict_of(written(tmp_path / "six", {"fedsdg": [0.9] * 6, "local": [0.1] * 6}))
    assert six.alone is not None
    assert six.alone.reading == "better"


def test_seeds_divide_the_data_anew_unless_clients_have_names(tmp_path: Path) -> None:
    test = {"fedsdg": around(0.5), "local": ALONE}
    found = verdict_of(written(tmp_path / "numbers", test, seeds=(0, 1, 2)))
    assert found.alone is not None
    behind = sum(x < 0 for x in NOISE)
    assert (found.alone.num_clients, found.alone.num_worse_off) == (3 * K, 3 * behind)
    assert any(" of seed 0 (-9.5)" in sentence for sentence in found.text)
    assert "The intervals cover 60 clients over 3 seeds, which say little" in found.text[-1]
    names = [f"site {k}" for k in range(K)]
    named = verdict_of(written(tmp_path / "names", test, seeds=(0, 1, 2), names=names))
    assert named.alone is not None
    assert (named.alone.num_clients, named.alone.num_worse_off) == (K, behind)
    assert named.worse_off[0].startswith(f"site {int(np.argmin(NOISE))} (")
    assert named.alone.high - named.alone.low > found.alone.high - found.alone.low


def test_runs_with_the_same_clients_share_a_verdict(tmp_path: Path) -> None:
    first = written(tmp_path / "a", {"fedavg": around(0.6), "local": ALONE})
    second = written(tmp_path / "b", {"fedsdg": around(0.7, NOISE[::-1])})
    found = verdict_of(first, second)
    assert found.best == "fedsdg"
    assert found.baseline is not None
    assert (found.baseline.over, found.baseline.reading) == ("fedavg", "better")
    assert found.alone is not None
    assert found.alone.value == pytest.approx(0.2)


def test_runs_with_other_clients_have_verdicts_of_their_own(tmp_path: Path) -> None:
    first = written(tmp_path / "a", {"fedavg": around(0.6), "local": ALONE})
    second = written(tmp_path / "b", {"fedsdg": around(0.7), "local": ALONE}, digest="other")
    found = table(read_all([first, second])).verdicts
    assert [one.best for one in found] == ["fedavg", "fedsdg"]
    text = compare([first, second])
    assert f"Verdict: {first}: fedavg is best" in text
    assert f"Verdict: {second}: fedsdg is best" in text


def test_an_unfinished_run_is_judged_so_far(tmp_path: Path) -> None:
    test = {"fedsdg": around(0.6), "local": ALONE}
    found = verdict_of(written(tmp_path / "run", test, finished=False))
    assert found.text[0] == "So far, fedsdg is best on validation data (60.0 %)."
    assert found.next_step == (
        "A run is not finished. If nothing runs it, this goes on with it: "
        f"fedtailor run {tmp_path}/run"
    )


def test_an_unfinished_run_is_judged_by_the_seeds_that_all_methods_have(tmp_path: Path) -> None:
    test = {"fedsdg": around(0.6), "local": ALONE}
    path = written(tmp_path / "run", test, seeds=(0, 1))
    shutil.rmtree(path / "methods/fedsdg/seed-1")
    begun = path / "methods/local/seed-1/commit.json"
    commit = json.loads(begun.read_text())
    begun.write_text(json.dumps(commit | {"finished": False, "rounds": 3}))
    found = verdict_of(path)
    assert found.text[0] == "So far, fedsdg is best on validation data (60.0 %)."
    assert not found.left_out


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
    assert found["text"][0] == "fedsdg is best on validation data (60.0 %)."
    assert found["next_step"].startswith("Take fedsdg: ")
    assert f"\nNext: Take fedsdg:\n    fedtailor predict {path} --method fedsdg" in text
    assert [row["label"] for row in json.loads(compare(path, as_json=True))["rows"]] == list(test)


MakeRun = Callable[..., Path]


def test_a_run_that_ends_at_its_best_round_may_be_too_short(make_run: MakeRun) -> None:
    fourth_of_six = verdict_of(make_run(methods=("fedavg", "local")))
    assert "is the last one" not in fourth_of_six.next_step
    found = verdict_of(make_run("short", methods=("fedavg", "local"), rounds=4))
    assert found.steps[0].text.startswith("The best round of fedavg and local is the last one, so")


def test_of_written_runs_the_reported_round_is_judged(make_run: MakeRun) -> None:
    found = verdict_of(make_run(methods=("fedavg", "fedsdg", "local")))
    assert found.best == "fedsdg"
    assert found.baseline is not None
    assert found.baseline.value == pytest.approx(0.1)  # 0.05 * (10 - 8) for every client
    assert (found.baseline.num_clients, found.baseline.num_seeds) == (10, 2)


def test_an_attack_is_named_and_a_method_that_fails_under_it_is_told_so(tmp_path: Path) -> None:
    test = {"fedavg": around(0.4), "local": ALONE}
    run = written(tmp_path / "run", test, majority=0.45)
    file = run / "experiment.json"
    attack = {"kind": "sign-flip", "fraction": 0.2, "strength": 5.0}
    file.write_text(json.dumps({**json.loads(file.read_text()), "attack": attack}))
    text = verdict_of(run).text
    for said in (
        "An attack was simulated (sign-flip, 20\u00a0%, strength 5)",
        "fedavg did not learn: before you give up, try a robust rule",
    ):
        assert any(line.startswith(said) for line in text)


def test_rounds_without_an_upload_are_counted(tmp_path: Path) -> None:
    run = written(tmp_path / "run", {"fedavg": around(0.4), "local": ALONE}, majority=0.45)
    folder = run / "methods/fedavg/seed-0"
    line = json.loads((folder / "history.jsonl").read_text())
    empty = line | {"cohort": [], "train_loss": None, "losses": [], "steps": [], "trained": 3}
    text = json.dumps(empty) + "\n"
    (folder / "history.jsonl").write_text(text)
    commit = json.loads((folder / "commit.json").read_text())
    commit["bytes"]["history"] = len(text)
    (folder / "commit.json").write_text(json.dumps(commit))
    found = verdict_of(run)
    for said in ("fedavg could not aggregate in 1 of 1 rounds", "see why so many rounds came to"):
        assert any(said in line for line in found.text)
