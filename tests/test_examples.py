"""The examples run."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_prints_a_table(path: Path) -> None:
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout
    log = done.stderr.splitlines()  # a summary, rounds and results; no warnings
    assert ": rounds " in log[0]
    rounds = [line for line in log[1:] if not line.startswith("  ")]
    assert all(": round " in line or ": accuracy " in line for line in rounds)
