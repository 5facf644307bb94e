"""Kills, damage and other processes: what a run directory survives, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import fedtailor as ft
from fedtailor.store.trial import TrialStore
from tests.runs.conftest import FOLDER, run

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_line_that_a_power_loss_has_cut_short_is_removed(unfinished: Path) -> None:
    path = unfinished / FOLDER / "refused.jsonl"
    path.write_bytes(b'{"reason": "a\rb"}\n{"round": 3, "cl')
    TrialStore(unfinished / FOLDER, 2)
    assert path.read_bytes() == b'{"reason": "a\rb"}\n'


_STEPS = {
    "two-methods": 60, "best-rounds": 60, "more-rounds": 40, "start-from": 40, "rolled-back": 40,
    "asynchronous": 40,
}  # fmt: skip


@pytest.mark.parametrize(
    ("experiment", "steps", "every"),
    [
        *(pytest.param(name, steps, 1, marks=pytest.mark.long) for name, steps in _STEPS.items()),
        pytest.param("two-methods", 60, 13, marks=pytest.mark.slow),
        pytest.param("start-from", 40, 26, marks=pytest.mark.slow),
        pytest.param("rolled-back", 40, 26, marks=pytest.mark.slow),
    ],
)
def test_a_kill_before_any_durable_step_loses_nothing(
    experiment: str, steps: int, every: int, tmp_path: Path
) -> None:
    arguments = [experiment, str(tmp_path), str(every)]
    command = [sys.executable, "-m", "tests.kill_everywhere", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > steps


@pytest.mark.slow
def test_a_power_loss_costs_at_most_the_round_in_progress(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.power_loss", str(tmp_path), "5"]  # of 150
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("history.jsonl", "history.jsonl is missing"),
        ("private.safetensors", "private.safetensors is missing"),
        ("round-000001.safetensors", "is missing"),
    ],
)
def test_what_is_missing_is_told(unfinished: Path, name: str, message: str) -> None:
    (unfinished / FOLDER / name).unlink()
    with pytest.raises(ft.InputError, match=message):
        run(unfinished)


@pytest.mark.parametrize("text", ["{", "[]", '{"round": 1}', None])
def test_a_damaged_commit_is_told(unfinished: Path, text: str | None) -> None:
    path = unfinished / FOLDER / "commit.json"
    if text is None:  # a best round without its validation result
        text = path.read_text().replace('"validation"', '"value"')
    path.write_text(text)
    with pytest.raises(ft.InputError, match=r"commit\.json"):
        run(unfinished)
