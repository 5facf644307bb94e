from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from fedtailor.temporary_folder import temporary_folder

WAITING = """
import time
from fedtailor.temporary_folder import temporary_folder
with temporary_folder("fedtailor-site-") as folder:
    (folder / "socket").touch()
    print(folder, flush=True)
    time.sleep(60)
"""


def test_what_a_killed_process_has_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "fedtailor").mkdir()
    command = [sys.executable, "-c", WAITING]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    killed, alive = (
        Path(process.stdout.readline().strip()) for process in processes if process.stdout
    )
    processes[0].kill()
    processes[0].communicate()
    time.sleep(1.1)
    with temporary_folder("fedtailor-site-") as mine:
        assert set(tmp_path.iterdir()) == {alive, mine, tmp_path / "fedtailor"}
    processes[1].terminate()
    processes[1].communicate()
    assert killed != alive


def test_a_folder_that_was_renamed_stays(tmp_path: Path) -> None:
    with temporary_folder(".new-", tmp_path) as folder:
        (folder / "file").touch()
        folder.rename(tmp_path / "new")
    assert [path.name for path in tmp_path.rglob("*")] == ["new", "file"]
