"""``fedtailor check``: exit codes, and what is printed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fedtailor.cli import main


@pytest.mark.slow
def test_damaged_files_are_listed(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    assert main(["check", str(run)]) == 0
    assert capsys.readouterr().out.endswith("files intact, 0 damaged\n")
    folder = run / "methods/fedsdg/seed-0"
    log = (folder / "clients.jsonl").read_bytes()
    (folder / "clients.jsonl").write_bytes(log.replace(b'"accuracy": [0', b'"accuracy": [1', 1))
    (folder / "server.safetensors").unlink()
    with pytest.raises(SystemExit, match="1"):
        main(["check", str(run)])
    *problems, last, _, remove, again = capsys.readouterr().out.splitlines()
    assert len(problems) == 2
    assert remove == f"    rm -r {run}/methods/fedsdg/seed-0"
    assert again == f"    fedtailor run {run}"
    assert "clients.jsonl is damaged: its checksum does not match" in problems[0]
    assert "server.safetensors is missing" in problems[1]
    assert last.endswith("2 damaged")
    with pytest.raises(SystemExit, match="1"):
        main(["check", str(run), "--json"])
    assert json.loads(capsys.readouterr().out)["problems"] == problems
    joined = folder / "onboarded/lagos/result.json"  # training again would not bring it back
    joined.parent.mkdir(parents=True)
    joined.write_text("{}")
    with pytest.raises(SystemExit, match="1"):
        main(["check", str(run)])
    assert "rm -r" not in capsys.readouterr().out
    assert main(["compare", str(run)]) == 2
    assert "clients.jsonl is damaged" in capsys.readouterr().err


def test_only_run_directories_are_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err
