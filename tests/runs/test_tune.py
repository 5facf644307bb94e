"""A search: as many candidates for every method, kept, and nothing but validation decides."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedtailor.cli import main
from fedtailor.errors import InputError
from fedtailor.runs import builtin
from fedtailor.runs import experiment as experiments
from fedtailor.runs.tune import Outcome, Range, best, load, search

FILE = """
name = "search"
rounds = 1
data.name = "digits"
data.limit = 120
split.clients = 3
split.validation = 0.3
model = {name = "cnn", pretrained = false, width = 0.05, image_size = 16}

[methods.fedavg]
[methods.near]
name = "fedprox"

[tune.space.all]
optimiser.lr = [0.01, 0.3]

[tune.space.fedprox]
mu = {low = 0.01, high = 1.0, log = true}
"""


def written(folder: Path, text: str = FILE) -> Path:
    (folder / "search.toml").write_text(text)
    return folder / "search.toml"


@pytest.mark.slow
def test_candidates_are_kept_and_the_best_can_be_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["tune", str(written(tmp_path)), "--out", str(out)]
    assert main(command) == 0
    printed = capsys.readouterr().out
    rows = [json.loads(line) for line in (out / "candidates.jsonl").read_text().splitlines()]
    assert [row["label"] for row in rows] == ["fedavg"] * 2 + ["near"] * 2
    assert {row["settings"]["optimiser.lr"] for row in rows[:2]} == {0.01, 0.3}  # a whole grid
    assert all(0.01 <= row["settings"]["mu"] <= 1 for row in rows[2:])
    assert printed.count("chosen\n") == 2
    tuned = experiments.load(out / "best.toml")
    for label in ("fedavg", "near"):
        (winner,) = (row for row in rows if row["label"] == label and row["chosen"])
        assert winner["score"] == max(row["score"] for row in rows if row["label"] == label)
        optimiser = tuned.methods[label].optimiser  # type: ignore[attr-defined]
        assert optimiser.lr == winner["settings"]["optimiser.lr"]
    assert tuned.data == experiments.load(tmp_path / "search.toml").data

    logs = [*(out / "candidates").rglob("*.jsonl")]
    before = {path: path.stat().st_mtime_ns for path in logs}
    assert main(command) == 0  # nothing is run again
    assert capsys.readouterr().out == printed
    assert before == {path: path.stat().st_mtime_ns for path in logs}


@pytest.mark.slow
def test_what_diverges_is_reported_and_never_chosen(tmp_path: Path) -> None:
    text = FILE.replace("[0.01, 0.3]", "[0.01, 1e6]").replace("rounds = 1", "rounds = 2")
    text = text[: text.index("[methods.near]")] + text[text.index("[tune.space.all]") :]
    text = text[: text.index("[tune.space.fedprox]")]
    tuning = load(written(tmp_path, text))
    found = list(search(tuning, tmp_path / "out"))
    assert {o.settings["optimiser.lr"]: o.score is None for o in found} == {0.01: False, 1e6: True}
    failed = next(o for o in found if o.score is None)
    assert "round" in str(failed.diverged)
    winner = best(found, "fedavg")
    assert winner is not None
    assert winner.settings["optimiser.lr"] == 0.01
    assert best([failed], "fedavg") is None


@pytest.mark.slow
def test_a_method_of_which_all_diverge_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        FILE.replace("rounds = 1", "rounds = 2") + "\n[tune.space.fedavg]\noptimiser.lr = [1e6]\n"
    )
    out = tmp_path / "out"
    assert main(["tune", str(written(tmp_path, text)), "--out", str(out)]) == 0
    assert "all candidates of fedavg diverged: best.toml lacks it" in capsys.readouterr().err
    assert [*experiments.load(out / "best.toml").methods] == ["near"]
    rows = [json.loads(line) for line in (out / "candidates.jsonl").read_text().splitlines()]
    assert {row["label"] for row in rows} == {"fedavg", "near"}


@pytest.mark.slow
def test_a_score_is_that_of_the_searchs_own_seed(tmp_path: Path) -> None:
    """Also where the folder has candidates of another seed already."""
    text = FILE.replace("[0.01, 0.3]", "[0.1]").replace(
        "[tune.space.fedprox]\nmu = {low = 0.01, high = 1.0, log = true}\n", ""
    )
    file = written(tmp_path, text)
    scores = {}
    for name, seeds in (("both", (0, 1)), ("fresh", (1,))):
        for seed in seeds:
            found = search(load(file, [f"seeds=[{seed}]", "evaluate.select=loss"]), tmp_path / name)
            scores[name, seed] = [one.score for one in found]
    assert scores["both", 1] == scores["fresh", 1] != scores["both", 0]


def test_of_equals_the_first_is_chosen() -> None:
    outcomes = [Outcome("a", 0, {}, 0.5, 1), Outcome("a", 1, {}, 0.5, 1), Outcome("b", 0, {}, 1, 1)]
    assert best(outcomes, "a") is outcomes[0]


def test_a_grid_file_goes_before_the_experiments_own(tmp_path: Path) -> None:
    grid = tmp_path / "grid.toml"
    grid.write_text("[tune]\ncandidates = 1\n[tune.space.fedprox]\nmu = [0.5]\n")
    tuning = load(written(tmp_path), grid=grid)
    assert tuning.candidates == 1
    assert tuning.spaces["near"] == {"optimiser.lr": (0.01, 0.3), "mu": (0.5,)}
    grid.write_text("[other]\n")
    with pytest.raises(InputError, match=r"must hold \[tune\] and nothing else"):
        load(tmp_path / "search.toml", grid=grid)


def test_as_many_candidates_as_the_smallest_grid_has_points(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert load(path).candidates == 2
    assert load(path, ["tune.candidates=1"]).candidates == 1
    ranges = ["tune.space.all.optimiser.lr={low=0.01, high=0.1}"]
    assert load(path, ranges).candidates == 8
    assert load(path, ranges).spaces["fedavg"] == {"optimiser.lr": Range(0.01, 0.1)}


def test_a_label_may_have_a_space_of_its_own(tmp_path: Path) -> None:
    tuning = load(written(tmp_path), ["tune.space.near.optimiser.lr=[0.1, 0.2, 0.4]"])
    assert tuning.spaces["near"]["optimiser.lr"] == (0.1, 0.2, 0.4)
    assert tuning.spaces["fedavg"]["optimiser.lr"] == (0.01, 0.3)


@pytest.mark.slow
def test_a_range_of_whole_numbers_is_searched_for_whole_numbers(tmp_path: Path) -> None:
    text = FILE.replace("optimiser.lr = [0.01, 0.3]", "rank = {low = 1, high = 64, log = true}")
    tuning = load(
        written(tmp_path, text[: text.index("[tune.space.fedprox]")]), ["tune.candidates=3"]
    )
    found = [o.settings["rank"] for o in search(tuning, tmp_path / "out") if o.label == "fedavg"]
    assert all(isinstance(rank, int) and 1 <= rank <= 64 for rank in found)
    assert len(set(found)) > 1
    assert experiments.load(tmp_path / "out" / "best.toml").methods["fedavg"].rank in found  # type: ignore[attr-defined]


@pytest.mark.slow
def test_no_setting_of_a_list_is_drawn_twice(tmp_path: Path) -> None:
    path = written(tmp_path, FILE[: FILE.index("[methods.near]")] + FILE[FILE.index("[tune") :])
    text = path.read_text().replace("[0.01, 0.3]", "[0.01, 0.02, 0.03, 0.04]")
    path.write_text(text[: text.index("[tune.space.fedprox]")])
    for sampler in ("random", "auto"):
        tuning = load(path, [f"tune.sampler={sampler}"])
        found = [o.settings["optimiser.lr"] for o in search(tuning, tmp_path / sampler)]
        assert sorted(found) == [0.01, 0.02, 0.03, 0.04]


@pytest.mark.slow
def test_a_result_that_is_no_number_is_never_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedtailor.runs.tune.metric_of", lambda runs: "loss")
    monkeypatch.setattr("fedtailor.runs.tune.summary", lambda *_: SimpleNamespace(mean=math.nan))
    found = list(search(load(written(tmp_path)), tmp_path / "out"))
    assert {(one.score, one.diverged) for one in found} == {(None, "loss on validation is nan")}
    assert (tmp_path / "out/candidates.jsonl").is_file()
    assert not (tmp_path / "out/best.toml").exists()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("tune.candidates=9", "fedavg has 2 settings to try; .* all get as many candidates"),
        ("tune.candidates=0", "tune.candidates = 0: .*greater than 0"),
        ("tune.candidate=3", "unknown key 'candidate' in tune; did you mean 'candidates'"),
        ("tune.grid=3", "unknown key 'grid' in tune; allowed: candidates, sampler, seed, space"),
        ("tune.sampler=\"grid\"", "near has a range; name its values"),
        ("split.validation=0", "split.validation is 0"),
        ("tune.space={}", "tune.space names no field"),
        ("tune.space.fedsdg.rank=[1]", "unknown method 'fedsdg' in tune.space"),
        ("tune.space.fedprox.nu=[1]", "unknown key 'nu' in methods.near"),
        ("tune.space.fedprox.mu=[-1]", "methods.near.mu = -1"),
        ("tune.space.fedprox.mu=3", "tune.space.near.mu = 3: must be a list of values"),
        ("tune.space.fedprox.mu=[1, 0, 1]", r"near.mu = \[1, 0, 1\]: 1 stands twice"),
        ("tune.space.fedprox.mu={low=1, high=0}", "near.mu: low = 1.0, .* low must be below high"),
        ("tune.space.fedprox.mu={low=0, high=1, log=true}", "above 0 with log"),
        ("tune.space.fedprox.mu={low=0.5}", "near.mu = .*: a range needs low and high"),
        ("tune.space.all.optimizer.lr=[1]", "all.optimizer.lr: none of .* methods has this field"),
    ],
)  # fmt: skip
def test_bad_input_is_told_before_anything_runs(tmp_path: Path, setting: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load(written(tmp_path), [setting])


def test_without_optuna_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(InputError, match=r"pip install 'fedtailor\[tune\]'"):
        next(search(load(written(tmp_path)), tmp_path / "out"))


def test_the_baselines_grids_are_searched_for_those_methods_that_are_there(tmp_path: Path) -> None:
    grid = builtin.grids()["baselines"]
    text = FILE[: FILE.index("[methods.fedavg]")]
    text += "[methods.near]\nname = 'fedprox'\n[methods.apfl]\n[methods.fedavg]\n"
    tuning = load(written(tmp_path, text), grid=grid)
    assert tuning.spaces.keys() == {"near", "apfl"}
    assert tuning.candidates == 4
    named = set(re.findall(r"tune.space.(.*)\]", grid.read_text()))
    every = "".join(f"[methods.{name}]\n" for name in named)
    everything = load(written(tmp_path, FILE[: FILE.index("[methods.fedavg]")] + every), grid=grid)
    assert everything.spaces.keys() == named
    grid = tmp_path / "typo.toml"
    grid.write_text("[tune.space.fedprx]\nmu = [1]\n")
    with pytest.raises(InputError, match=r"unknown method .fedprx. in tune\.space"):
        load(written(tmp_path, text), grid=grid)


@pytest.mark.parametrize("name", ["fedsdg", "fedhft", "pfedgate", "fedmerge", "fedsq"])
def test_the_shipped_grids_fit_their_methods(tmp_path: Path, name: str) -> None:
    text = FILE[: FILE.index("[tune.space.all]")].replace("[methods.fedavg]", f"[methods.{name}]")
    tuning = load(written(tmp_path, text), grid=Path(name))
    assert len(tuning.spaces[name]) >= 2
    assert tuning.candidates >= 6
