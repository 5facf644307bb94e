"""The page of claims is what the script writes, and the manifests plan what claims need."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from evidence.claims import PAGE, claims, commands, main, page, repeated
from evidence.instructions import TABLES
from evidence.rates import TUNED
from evidence.run import EXPERIMENTS, Run, execute, lines, planned
from evidence.verdicts import DIRECTION, HOLDS, NOT_HERE, NOT_RUN, Results, outcome, runs

import fedtailor as ft


@pytest.mark.slow
def test_the_page_is_what_the_script_writes() -> None:
    assert PAGE.read_text() == page(lines()), "write it again: python -m evidence.claims"


def test_every_run_that_a_claim_needs_is_planned() -> None:
    missing = {run for claim in claims() for run in runs(claim)} - set(planned())
    assert not missing, "\n".join(sorted(run.command for run in missing))


@pytest.mark.slow
def test_every_run_of_a_paper_s_experiment_is_on_the_page() -> None:
    """A run whose result nobody likes is not left out; the tables on instructions have others."""
    shown = {run for claim in claims() for run in runs(claim)}
    shown.update(*(table.runs for table in TABLES))
    kept = {
        Run(line["file"], tuple(line["set"]), line["method"], line["seed"])
        for line in lines()
        if line["file"].startswith("papers/") and line["seed"] != TUNED
    }
    assert not kept - shown, "\n".join(sorted(run.command for run in kept - shown))


def test_a_claim_has_a_name_of_its_own() -> None:
    names = [claim["id"] for claim in claims()]
    assert len(set(names)) == len(names) >= 25


@pytest.mark.slow
def test_a_row_s_commands_are_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["claims", "fedsq-4"])
    main()
    claim = next(claim for claim in claims() if claim["id"] == "fedsq-4")
    printed = capsys.readouterr().out.splitlines()
    assert printed[1:-1] == commands(claim)
    assert printed[-1].startswith("page: 30 against 25; ")


CLAIM = {"file": "a.toml", "ours": "x", "theirs": "y", "seeds": [0, 1]}


def line(method: str, seed: int, *accuracies: float, curve: Any = None, set_: Any = ()) -> Any:
    personal = {"clients": list(range(len(accuracies))), "accuracy": list(accuracies)}
    results = {"personal": personal, "curve": curve or {}}
    return {
        "file": "a.toml", "set": set_, "method": method, "seed": seed, "results": results,
    }  # fmt: skip


def test_a_method_is_ahead_if_the_interval_is_above_zero() -> None:
    claim = {**CLAIM, "rule": "ahead"}
    y = [line("y", seed, 0.5, 0.6, 0.7) for seed in (0, 1)]
    above = outcome(claim, Results([*y, *(line("x", s, 0.6, 0.8, 0.8) for s in (0, 1))]))
    assert (above.verdict, above.ours) == (HOLDS, "73.3 against 60.0")
    assert above.spread.startswith("+13.3 [+10.0, ")
    mixed = outcome(claim, Results([*y, *(line("x", s, 0.9, 0.6, 0.4) for s in (0, 1))]))
    assert mixed.verdict == DIRECTION
    assert outcome({**claim, "ours": "y", "theirs": "x"}, Results([*y])).verdict == NOT_RUN
    below = [line("x", s, 0.4, 0.6, 0.6) for s in (0, 1)]
    assert outcome(claim, Results([*y, *below])).verdict == NOT_HERE
    assert outcome({**claim, "rule": "level", "margin": 7.0}, Results([*y, *below])).verdict == (
        DIRECTION
    )
    assert outcome({**claim, "rule": "level", "margin": 11.0}, Results([*y, *below])).verdict == (
        HOLDS
    )


def test_the_lower_loss_is_ahead() -> None:
    claim = {**CLAIM, "rule": "lower"}
    found = [line(name, s, a, a + 1) for s in (0, 1) for name, a in (("x", 2.0), ("y", 2.25))]
    better, worse = (
        outcome({**claim, "ours": a, "theirs": b}, Results(found)) for a, b in ("xy", "yx")
    )
    assert (better.verdict, better.ours) == (HOLDS, "2.500 against 2.750 nats")
    assert better.spread.startswith("-0.250 [")
    assert worse.verdict == NOT_HERE


def test_two_settings_of_one_method_are_compared() -> None:
    claim = {**CLAIM, "rule": "ahead", "theirs": "x", "set": ["w=2"], "theirs_set": ["w=1"]}
    large = [line("x", s, 0.8, 0.9, set_=["w=2"]) for s in (0, 1)]
    small = [line("x", s, 0.6, 0.7, set_=["w=1"]) for s in (0, 1)]
    assert outcome(claim, Results(large)).verdict == NOT_RUN
    found = outcome(claim, Results([*large, *small]))
    assert (found.verdict, found.ours) == (HOLDS, "85.0 against 65.0")
    first, second = commands(claim, [0, 1])
    assert first == "fedtailor run a --set 'w=2' --set 'methods=[\"x\"]' --set 'seeds=[0,1]'"
    assert second == first.replace("w=2", "w=1")


def test_one_seed_is_not_enough_and_a_diverged_method_is_not_ahead() -> None:
    claim = {**CLAIM, "rule": "ahead"}
    one = outcome(claim, Results([line("x", 0, 0.9), line("y", 0, 0.1), line("x", 1, 0.9)]))
    assert (one.verdict, one.seeds) == (DIRECTION, [0])
    failed = {**line("x", 0), "failed": "not finite"}
    lost = outcome(claim, Results([failed, line("y", 0, 0.1)]))
    assert (lost.verdict, lost.ours) == (NOT_HERE, "x diverged")
    both = [line(name, s, a) for s in (0, 1) for name, a in (("x", 0.1), ("y", 0.9))]
    rest = outcome({**claim, "ours": "y", "theirs": "x"}, Results([*both, failed]))
    assert (rest.seeds, rest.ours) == ([1], "90.0 against 10.0; x diverged with seed 0")


def test_a_method_is_sooner_if_it_reaches_the_lower_best_in_fewer_rounds() -> None:
    claim = {**CLAIM, "rule": "sooner"}
    fast = [line("x", s, curve={"2": 0.4, "4": 0.71, "6": 0.8}) for s in (0, 1)]
    slow = [line("y", s, curve={"2": 0.3, "4": 0.5, "6": 0.7}) for s in (0, 1)]
    found = outcome(claim, Results([*fast, *slow]))
    assert (found.verdict, found.ours, found.spread) == (HOLDS, "4 against 6", "by seed -2, -2")


def test_a_gain_is_more_than_another_if_the_intervals_are_apart() -> None:
    claim = {**CLAIM, "rule": "gains more", "than_set": ["k=1"]}
    here = [line(m, s, v, v) for m, v in (("x", 0.8), ("y", 0.3)) for s in (0, 1)]
    there = [line(m, s, v, v, set_=["k=1"]) for m, v in (("x", 0.5), ("y", 0.4)) for s in (0, 1)]
    found = outcome(claim, Results([*here, *there]))
    assert (found.verdict, found.ours) == (HOLDS, "+50.0 against +10.0")
    wide = [line(m, s, *v) for m, v in (("x", (0.9, 0.3)), ("y", (0.3, 0.3))) for s in (0, 1)]
    assert outcome(claim, Results([*wide, *there])).verdict == DIRECTION  # intervals overlap


def test_two_methods_are_level_on_either_side_alone() -> None:
    claim = {**CLAIM, "rule": "equal", "margin": 5.0}
    pair = [line(m, s, v, v) for m, v in (("x", 0.7), ("y", 0.6)) for s in (0, 1)]
    assert outcome(claim, Results(pair)).verdict == NOT_HERE


@pytest.mark.parametrize(
    ("value", "verdict"), [(1.1, HOLDS), (1.15, DIRECTION), (0.75, NOT_HERE), (1.25, NOT_HERE)]
)
def test_a_number_is_within_its_tolerance_or_twice_that(value: float, verdict: str) -> None:
    claim = {**CLAIM, "rule": "figure", "figure": "sparsity", "near": 1.0, "tolerance": 0.101}
    del claim["theirs"]
    lines_ = [{**line("x", s, 0.5), "results": {"sparsity": value}} for s in (0, 1)]
    assert outcome(claim, Results(lines_)).verdict == verdict


def test_bytes_are_exact_with_one_seed() -> None:
    claim = {**CLAIM, "rule": "bytes", "figure": "bytes_down", "near": 5.0, "tolerance": 0.1}
    sent = [{**line(m, 0), "results": {"bytes_down": b}} for m, b in (("x", 10), ("y", 50))]
    assert outcome({**claim, "seeds": [0]}, Results(sent)).verdict == HOLDS


@pytest.mark.long
def test_a_row_is_worked_out_again_from_its_run_directory(tmp_path: Path) -> None:
    settings = ["preset=small", "data.limit=200", "rounds=2"]
    claim = {
        "id": "x-1", "rule": "ahead", "file": "map.toml", "set": settings, "ours": "fedavg",
        "theirs": "local", "seeds": [0],
    }  # fmt: skip
    kept = outcome(claim, Results([execute(run, tmp_path) for run in runs(claim)]))
    out = tmp_path / "own"
    with pytest.raises(ft.InputError, match="no directory"):
        repeated(claim, [out])
    whole = ft.load(EXPERIMENTS / "map.toml", [*settings, "seeds=[0]"])
    methods = {label: whole.methods[label] for label in ("local", "fedavg")}
    ft.run(replace(whole, methods=methods), out, summary=False)
    assert repeated(claim, [out]) == kept
    with pytest.raises(ft.InputError, match="no runs of x-1 are in"):
        repeated({**claim, "set": ["preset=small"]}, [out])
