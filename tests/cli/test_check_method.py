"""``fedtailor check-method``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedtailor.cli import main

SOURCE = '''
"""Mine: nothing is learnt."""

from dataclasses import dataclass
from typing import ClassVar

import fedtailor as ft


@dataclass(frozen=True)
class Mine(ft.FineTuning):
    name: ClassVar[str] = "mine"
    learns: bool = False

    def check(self, task, num_clients, cohort_size, rounds):
        if "classifier.weight" in task.state:
            raise ft.InputError("pictures alone")

    def aggregate(self, task, server, uploads, cohort):
        return super().aggregate(task, server, uploads, cohort) if self.learns else server
'''


@pytest.mark.slow
def test_each_check_has_a_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    mine = f"{tmp_path / 'mine.py'}:Mine"
    assert main(["check-method", mine]) == 2
    printed = capfd.readouterr()
    lines = printed.out.splitlines()
    assert "pictures  padding is invisible: ok" in lines
    assert sum("FAILS" in line for line in lines) == 1
    assert printed.err == f"fedtailor: {mine} fails 1 of {len(lines)} checks\n"
    assert main(["check-method", mine, "--set", "learns=true", "--json"]) == 0
    outcomes = json.loads(capfd.readouterr().out)
    assert len(outcomes) == len(lines)
    assert not any(outcome["problem"] for outcome in outcomes)
    assert main(["describe", mine]) == 0
    assert "learns" in capfd.readouterr().out
