"""Kills, damage and other processes: what a run directory survives, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import fedtailor as ft
from tests.runs.conftest import FOLDER, run

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(("finished", "steps"), [("0", 60), ("2", 40)])
def test_a_kill_before_any_durable_step_loses_nothing(
    tmp_path: Path, finished: str, steps: int
) -> None:
    command = [sys.executable, "-m", "tests.kill_everywhere", str(tmp_path), finished]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > steps


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("history.jsonl", "fewer than the"),
        ("private.safetensors", "private states"),
        ("round-000001.safetensors", "is missing"),
    ],
)
def test_what_is_missing_is_told(unfinished: Path, name: str, message: str) -> None:
    (unfinished / FOLDER / name).unlink()
    with pytest.raises(ft.InputError, match=message):
        run(unfinished)


@pytest.mark.parametrize("text", ["{", "[]", '{"round": 1}'])
def test_a_damaged_commit_is_told(unfinished: Path, text: str) -> None:
    (unfinished / FOLDER / "commit.json").write_text(text)
    with pytest.raises(ft.InputError, match=r"commit\.json"):
        run(unfinished)
