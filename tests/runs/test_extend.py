"""A run that goes on with more methods, seeds or rounds, and what may not change meanwhile."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fedtailor as ft
from fedtailor.engine.config import ScheduleConfig
from fedtailor.errors import InputError
from fedtailor.runs.experiment import Experiment
from fedtailor.runs.manifest import open_run
from fedtailor.uploads.attacks import AttackConfig
from tests.forked import contents
from tests.runs.conftest import EXPERIMENT
from tests.small import digits, digits_backbone, without_checksum

TWO = replace(EXPERIMENT, methods={"fedsdg": ft.FedSDG(rank=2), "local": ft.Local()})


def run(experiment: Experiment, out: Path, **options: Any) -> Path:
    return ft.run(experiment, out, data=digits(), backbone=digits_backbone(), **options).path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three rounds of two methods with two seeds, from the start."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    return run(replace(TWO, rounds=3, seeds=(0, 1), name="mine"), out)


@pytest.mark.slow
def test_methods_seeds_and_rounds_are_added_as_if_they_had_been_there_from_the_start(
    whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run(replace(EXPERIMENT, rounds=1, name="mine"), out)
    run(replace(TWO, rounds=2, name="other"), out)
    run(replace(TWO, rounds=3, seeds=(0, 1)), out)
    assert contents(out) == contents(whole)


@pytest.mark.slow
def test_what_is_not_named_is_kept_and_goes_on_with_the_directory(
    whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run(replace(TWO, name="mine"), out)
    kept = out / "methods/local/seed-0"
    before = {path.name: path.read_bytes() for path in kept.iterdir()}
    run(replace(EXPERIMENT, rounds=3, seeds=(1,)), out)
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == before
    assert "Different rounds: local, seed 0 has 2 of 3" in ft.compare([out])
    run(open_run(out), out)
    assert contents(out) == contents(whole)


@pytest.mark.slow
def test_a_finished_part_that_nothing_is_added_to_is_not_touched(whole: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    run(replace(EXPERIMENT, rounds=3), whole)
    after = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    assert {p for p in before if before[p] != after[p]} <= {whole / ".lock", whole}


@pytest.mark.slow
def test_an_extra_evaluation_is_all_that_differs_where_rounds_ended_between_two(
    tmp_path: Path,
) -> None:
    every = replace(EXPERIMENT, evaluate=ft.EvaluateConfig(every=2))
    run(replace(every, rounds=3), tmp_path / "a")
    run(replace(every, rounds=4), tmp_path / "a")
    run(replace(every, rounds=4), tmp_path / "b")
    a, b = contents(tmp_path / "a"), contents(tmp_path / "b")
    differing = {Path(name).name for name in a.keys() | b.keys() if a.get(name) != b.get(name)}
    assert differing == {"clients.jsonl", "diagnostics-000003.safetensors"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"local": ft.LocalConfig(steps=2)}, "local.steps is 1 in {out} and 2 now: choose"),
        (
            {"methods": {"fedsdg": ft.FedSDG(rank=4)}, "cohort": ft.CohortConfig(size=2)},
            "cohort.size is none in {out} and 2 now; methods.fedsdg.rank is 2 in {out} and 4 now: ",
        ),
        ({"methods": {"fedsdg": ft.Local()}}, 'methods.fedsdg.name is "fedsdg" in {out} and "lo'),
        ({"rounds": 1}, "rounds is 2 in {out} and 1 now: rounds can only be added; choose"),
    ],
)
def test_what_differs_is_refused_by_name_with_both_values(
    finished: Path, change: dict[str, Any], message: str
) -> None:
    before = contents(finished)
    with pytest.raises(ft.InputError) as error:
        run(replace(EXPERIMENT, **change), finished)
    assert message.format(out=finished) in str(error.value)
    assert contents(finished) == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_more_rounds_may_not_change_the_rates_of_rounds_that_are_done(
    tmp_path: Path, name: Any
) -> None:
    falling = replace(EXPERIMENT, schedule=ScheduleConfig(name))
    out = run(falling, tmp_path / "out")
    with pytest.raises(ft.InputError, match="learning rates of rounds that are done") as error:
        run(replace(falling, rounds=3), out)
    assert "rounds is 2 in" in str(error.value)
    assert json.loads((out / "experiment.json").read_text())["rounds"] == 2


@pytest.mark.slow
def test_rounds_inside_the_warm_up_can_be_followed_by_any_number(tmp_path: Path) -> None:
    rising = replace(EXPERIMENT, rounds=1, schedule=ScheduleConfig("cosine", warmup_rounds=1))
    run(rising, tmp_path / "a")
    run(replace(rising, rounds=2), tmp_path / "a")
    run(replace(rising, rounds=2), tmp_path / "b")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


@pytest.mark.slow
def test_rounds_are_added_to_training_alone_where_clients_stay_equally_trained(
    tmp_path: Path,
) -> None:
    """One client of three in each of three rounds is one training each, and in six rounds two. In
    five it is two, too: rounds that are done would have had other clients."""
    alone = replace(
        EXPERIMENT, methods={"local": ft.Local()}, rounds=3, cohort=ft.CohortConfig(size=1)
    )
    out = run(alone, tmp_path / "out")
    with pytest.raises(
        ft.InputError, match=r"local has 3 rounds in .*, and 5 now: clients train equally"
    ):
        run(replace(alone, rounds=5), out)
    run(replace(alone, rounds=6), out)
    run(replace(alone, rounds=6), tmp_path / "whole")
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.slow
def test_a_run_of_a_version_with_fewer_settings_goes_on(whole: Path, tmp_path: Path) -> None:
    """A setting that the run doesn't name is at its default; another value is refused."""
    out = run(replace(TWO, rounds=3, name="mine"), tmp_path / "out")
    path = without_checksum(out / "experiment.json")
    content = json.loads(path.read_text())
    del content["attack"], content["split"]["shuffled"]
    for method in content["methods"]:
        del method["robust"]["before"]
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"attack.kind is \"none\" in .* and \"mimic\" now"):
        run(replace(TWO, rounds=3, attack=AttackConfig("mimic")), out)
    run(replace(TWO, rounds=3, seeds=(0, 1)), out)
    assert contents(out) == contents(whole)


@pytest.mark.slow
def test_the_bound_on_norms_may_change_while_a_method_is_unfinished(
    whole: Path, tmp_path: Path
) -> None:
    out, lower = tmp_path / "out", replace(EXPERIMENT, cohort=ft.CohortConfig(max_norm=50.0))
    run(replace(EXPERIMENT, rounds=3), out, on_round=lambda done: ft.STOP)
    run(replace(lower, rounds=3), out)
    history = (out / "methods/fedsdg/seed-0/history.jsonl").read_text().splitlines()
    bounds = [json.loads(line).get("bounds", {}).get("max_norm", "as before") for line in history]
    assert bounds == [None, 50.0, "as before"]
    for more in ({}, {"seeds": (0, 1), "part": "1/2"}):  # nothing of it is left to run
        run(replace(EXPERIMENT, rounds=3, seeds=more.pop("seeds", (0,))), out, **more)
        assert open_run(out).cohort.max_norm == 50.0


@pytest.mark.slow
def test_the_table_says_which_method_had_which_bound(tmp_path: Path) -> None:
    """Also if the command that changed it was stopped before a method went on, or if one was added
    later."""
    out, lower = tmp_path / "out", ft.CohortConfig(max_norm=50.0)
    run(TWO, out, on_round=lambda done: ft.STOP)
    changed = replace(TWO, cohort=lower)
    first, *others = changed.methods
    run(replace(changed, methods={first: changed.methods[first]}), out)
    more = {**changed.methods, "late": ft.FedAvg()}
    run(replace(changed, methods=more), out)
    notes = " ".join(ft.compare([out]).split())
    note = "cohort.max_norm is 50.0 from round 2 on; it was none"
    for label in (first, *others):
        assert f"{label}, seed 0: {note}" in (out / "run.log").read_text()
    begun = "; ".join(f"{label}, seed 0" for label in (first, *others))
    assert f"{out}: cohort.max_norm was none, then 50.0 ({begun}); 50.0 (late, seed 0)" in notes
