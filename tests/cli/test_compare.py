"""``fedtailor compare``."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from fedtailor.cli import main

pytestmark = pytest.mark.slow


def test_the_table_is_printed(finished: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(finished)]) == 0
    printed = capfd.readouterr().out
    assert "fedsdg" in printed
    assert "local" in printed


def test_json_holds_the_same_numbers_under_both_executors(
    file: Path, finished: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(finished), "--json"]) == 0
    vectorised = json.loads(capfd.readouterr().out)
    setting = "engine.executor=sequential"
    out = tmp_path / "sequential"
    assert main(["run", str(file), "--set", setting, "--out", str(out), "--json"]) == 0
    sequential = json.loads(capfd.readouterr().out)

    assert close(vectorised, sequential)
    for label in ("fedsdg", "local"):
        ours, theirs = (evaluations(run, label) for run in (finished, out))
        assert close(ours, theirs)


def test_all_are_compared_with_one_that_is_named(
    finished: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(finished), "--against", "local"]) == 0
    *_, row = capfd.readouterr().out.splitlines()
    assert main(["compare", str(finished), "--against", "local", "--json"]) == 0
    (one,) = json.loads(capfd.readouterr().out)
    assert (one["method"], one["over"]) == ("fedsdg", "local")
    assert row.split()[:3] == ["fedsdg", "local", f"{100 * one['value']:+.1f}"]
    assert main(["compare", str(finished), "--against", "fedsgd"]) == 2
    assert "unknown method 'fedsgd'; did you mean 'fedsdg'" in capfd.readouterr().err


def test_tables_for_spreadsheets_and_papers(
    finished: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(finished), "--latex"]) == 0
    assert capfd.readouterr().out.startswith("\\begin{")
    assert main(["compare", str(finished), "--json"]) == 0
    expected = {row["label"]: row for row in json.loads(capfd.readouterr().out)["rows"]}
    assert main(["compare", str(finished), "--csv"]) == 0
    rows = list(csv.DictReader(capfd.readouterr().out.splitlines()))
    assert {row["label"] for row in rows} == set(expected)
    for row in rows:
        known = expected[row["label"]]
        result = known["personal_model"]
        assert float(row["decile"]) == result["bottom_decile"]["mean"]
        assert float(row["bytes_up"]) == known["bytes_up"]
        assert row["rounds"] == "; ".join(map(str, result["rounds"]))


def evaluations(run: Path, label: str) -> list[dict]:
    lines = (run / "methods" / label / "seed-0/clients.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def close(a: object, b: object) -> bool:
    """Equal but for floats, which may differ by 1e-4; names of runs, and seconds, aside."""
    if isinstance(a, dict) and isinstance(b, dict):
        skip = {"seconds", "cpu_seconds", "run", "runs", "name", "peak_memory_mb", "cost", "text"}
        assert a.keys() == b.keys()
        return all(close(a[key], b[key]) for key in a.keys() - skip)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(close, a, b))
    return a == (pytest.approx(b, abs=1e-4) if isinstance(b, float) else b)


def test_a_folder_that_is_no_run_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "nowhere"]) == 2
    error = capfd.readouterr().err
    assert error == ("fedtailor: no directory 'nowhere'; give one that `fedtailor run` wrote\n")
