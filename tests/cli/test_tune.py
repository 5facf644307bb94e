"""``fedtailor tune``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedtailor.cli import main


@pytest.mark.slow
def test_candidates_as_json_and_the_chosen_settings_as_a_file(
    file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    grid = tmp_path / "grid.toml"
    grid.write_text("[tune.space.local]\noptimiser.lr = [0.001, 0.02]\n")
    out = tmp_path / "candidates"
    command = ["tune", str(file), "--grid", str(grid), "--out", str(out), "--json"]
    assert main([*command, "--set", 'methods=["local"]', "--set", "rounds=1"]) == 0
    rows = json.loads(capfd.readouterr().out)
    assert sorted(row["settings"]["optimiser.lr"] for row in rows) == [0.001, 0.02]
    assert [row["chosen"] for row in rows].count(True) == 1
    assert (out / "best.toml").is_file()


def test_an_experiment_without_a_space_is_refused(
    file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", str(file)]) == 2
    error = capfd.readouterr().err
    assert error.startswith("fedtailor: ")
    assert error.count("\n") == 1
