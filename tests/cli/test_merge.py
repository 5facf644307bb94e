"""``fedtailor run --part`` on two machines, and ``fedtailor merge``."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedtailor.cli import main
from tests.forked import contents


@pytest.mark.slow
def test_two_machines_parts_make_one_machines_run(
    file: Path, finished: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folders = [str(tmp_path / "a"), str(tmp_path / "b")]
    for part, folder in zip(("1/2", "2/2"), folders, strict=True):
        assert main(["run", str(file), "--part", part, "--out", folder]) == 0
    capfd.readouterr()
    out = tmp_path / "out"
    assert main(["merge", folders[0], "--out", str(out)]) == 2
    assert capfd.readouterr().err == "fedtailor: missing: local with seed 0\n"
    assert main(["merge", *folders, "--out", str(out)]) == 0
    printed = capfd.readouterr()
    assert printed.err == ""
    assert "fedsdg" in printed.out
    assert f"report: {out / 'report.html'}" in printed.out
    assert contents(out) == contents(finished)
