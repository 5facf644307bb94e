"""Without room on the disk one line names the file, and the same command goes on later. A limit on
the size of files stands for a full disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedtailor.cli import main

FILE = """
rounds = 3
data = {name = "digits", limit = 200}
split = {clients = 4}
model = {name = "lenet", width = 0.2, image_size = 16, pretrained = false}
local = {batch_size = 8, steps = 1}
engine = {executor = "sequential", upload_memory_mb = 0.001}
[methods.fedavg]
robust = {rule = "median"}
"""


PROGRAM = """
import resource, sys
from fedtailor.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "place"),
    [(9_000, "out/methods/fedavg/seed-0/round-000001"), (30_000, "temporary/fedtailor-")],
)
def test_without_room_a_file_is_named_and_the_run_goes_on(
    limit: int, place: str, tmp_path: Path
) -> None:
    """A state has 13 kB, the uploads 52."""
    file, temporary = tmp_path / "run.toml", tmp_path / "temporary"
    file.write_text(FILE)
    temporary.mkdir()
    uploads = f"engine.upload_memory_mb={1 if place.startswith('out') else 0.001}"
    arguments = ["run", str(file), "--out", str(tmp_path / "out"), "--set", uploads]
    command = [sys.executable, "-c", PROGRAM, str(limit), *arguments]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"fedtailor: {tmp_path}/{place}")
    assert "File too large" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not list(temporary.glob("fedtailor-*"))
    assert main(arguments) == 0


COMMANDS = """
import json, resource, sys
from fedtailor.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
for command in json.loads(sys.argv[1]):
    assert main(command) == 2, command
"""


@pytest.mark.slow
def test_without_room_what_is_made_of_a_run_names_its_file(tmp_path: Path) -> None:
    file, table, run = tmp_path / "run.toml", tmp_path / "notes.csv", tmp_path / "run"
    file.write_text(FILE)
    assert main(["run", str(file), "--out", str(run)]) == 0
    table.write_text("text,label,site\n" + "some words,a,x\nother words,b,y\n" * 40)
    report, folder, new = tmp_path / "report.html", tmp_path / "exported", tmp_path / "new.toml"
    commands = [
        ["report", str(run), "--out", str(report)],
        ["export", str(run), "--method", "fedavg", "--out", str(folder)],
        ["new", str(table), "--out", str(new)],
    ]
    command = [sys.executable, "-c", COMMANDS, json.dumps(commands)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("fedtailor: ")]
    assert [str(path) in line for path, line in zip([report, folder, new], told, strict=True)]
    assert all("File too large" in line for line in told), told
    assert not report.exists()
    assert not folder.exists()
