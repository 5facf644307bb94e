"""The manifest can be run, and every line of results is of settings that the files still have."""

from dataclasses import replace
from pathlib import Path

import pytest
from evidence.rates import TUNED, best
from evidence.run import Run, alone, collected, digest, execute, has_ends, lines, planned, resolved


@pytest.mark.slow
def test_every_planned_run_is_a_run_of_its_own() -> None:
    runs = planned()
    assert len({digest(resolved(run.experiment())) for run in runs}) == len(runs)


@pytest.mark.slow
def test_no_line_has_settings_that_its_file_no_longer_has() -> None:
    stale = []
    for line in lines():
        run = Run(line["file"], tuple(line["set"]), line["method"], line["seed"])
        if digest(resolved(run.experiment())) != line["digest"]:
            stale.append(run.command)
    assert not stale, "these results are of other settings; remove their lines, or run them again"


def test_no_run_has_two_lines() -> None:
    runs = [(li["file"], tuple(li["set"]), li["method"], li["seed"]) for li in lines()]
    assert len(set(runs)) == len(runs)


def test_perplexities_of_texts_without_an_end_are_known() -> None:
    old = {"digest": "a", "results": {"metric": "loss"}}
    assert not has_ends(old)
    assert has_ends({**old, "ends": True})
    assert has_ends({"digest": "b", "results": {"metric": "accuracy"}})


def test_no_result_is_of_a_seed_that_has_decided_a_rate() -> None:
    assert all(run.seed == 10 for run in planned() if any(".lr" in s for s in run.settings))


@pytest.mark.slow
def test_a_line_says_what_the_run_has_come_to(tmp_path: Path) -> None:
    run = Run("map.toml", ("preset=small", "data.limit=200", "rounds=1"), "fedavg", 0)
    assert alone(run, tmp_path, 0.1) is None  # stopped while it begins
    line = execute(run, tmp_path)
    personal = line["results"]["personal"]
    assert len(personal["accuracy"]) == len(personal["num_examples"]) == 20
    assert line["settings"]["methods"][0]["trainable"] == "lora"
    assert line["digest"] == digest(line["settings"])
    (found,) = collected(tmp_path / line["digest"], [run, replace(run, seed=1)])
    assert found["results"] == line["results"]


@pytest.mark.slow
def test_every_file_has_the_rates_that_were_best_on_validation_data() -> None:
    wrong = []
    for (file, base, method), own in best().items():
        chosen, trial = Run(file, base, method, TUNED), Run(file, (*base, *own), method, TUNED)
        if resolved(chosen.experiment()) != resolved(trial.experiment()):
            wrong.append(trial.command)
    assert not wrong, "these trials were the best of their methods; the files have other settings"
