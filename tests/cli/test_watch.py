"""``fedtailor watch``, beside a run in a process of its own."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from fedtailor.cli import main
from tests.interrupts import interruptible
from tests.report.conftest import write_run

FILE = """
rounds = 3
data = {name = "digits", limit = 100}
split = {clients = 2}
model = {name = "lenet", width = 0.25, image_size = 16, pretrained = false}
local = {steps = 1}
[methods.local]
[methods.fedavg]
"""
FEDTAILOR = [sys.executable, "-m", "fedtailor"]


def start(*arguments: object, **fields: Any) -> subprocess.Popen[str]:
    command = [*FEDTAILOR, *map(str, arguments)]
    with interruptible():
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **fields)


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    """Two methods with one seed, three of eight rounds."""
    return write_run(tmp_path / "run", seeds=(0,), done=3)


@pytest.mark.slow
def test_a_run_is_waited_for_and_followed_to_its_end(tmp_path: Path) -> None:
    file, out = tmp_path / "e.toml", tmp_path / "run"
    file.write_text(FILE)
    watch = start("watch", out, stderr=subprocess.PIPE)
    assert watch.stderr is not None
    assert watch.stderr.readline().startswith(f"fedtailor: no directory '{out}' yet; waiting for")
    run = start("run", file, "--out", out, stderr=subprocess.DEVNULL)
    lines = watch.communicate()[0].splitlines()
    run.communicate()
    assert (watch.returncode, run.returncode) == (0, 0)
    rounds = [
        line for line in lines if re.match(r"fedavg, seed 0: round 3 of 3, training loss", line)
    ]
    assert len(rounds) == 1
    assert "e has ended; 6 of 6 rounds" in lines
    assert not any("test" in line for line in lines[1:-1])  # those name the directory


@pytest.mark.slow
def test_a_killed_run_is_told_and_ctrl_c_leaves_quietly(tmp_path: Path) -> None:
    file, out = tmp_path / "e.toml", tmp_path / "run"
    file.write_text(FILE.replace("rounds = 3", "rounds = 3000"))
    run = start("run", file, "--out", out, stderr=subprocess.DEVNULL)
    try:
        while not (out / "methods/local/seed-0/commit.json").exists():
            assert run.poll() is None
            time.sleep(0.01)
        watch = start("watch", out, stderr=subprocess.PIPE)
        assert watch.stdout is not None
        assert watch.stdout.readline().startswith("e: ")
        watch.send_signal(signal.SIGINT)
        assert (watch.wait(30), watch.communicate()[1]) == (0, "")
        watch = start("watch", out)
        assert watch.stdout is not None
        watch.stdout.readline()
    finally:
        run.kill()
        run.communicate()
    last = watch.communicate()[0].splitlines()[-1]
    assert watch.returncode == 0
    assert last.startswith(
        "e is interrupted: no process runs it, and rounds are left; local, seed 0: after round "
    )


@pytest.mark.slow
def test_a_terminal_gets_a_table(unfinished: Path) -> None:
    ours, its = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    watch = subprocess.Popen(
        [*FEDTAILOR, "watch", str(unfinished)], stdin=its, stdout=its, env=environment
    )
    os.close(its)
    text = b""
    while True:
        try:
            text += os.read(ours, 65536)
        except OSError:  # the other side is closed
            break
    assert watch.wait() == 0
    assert b"\x1b[?25h" in text  # the cursor is there again
    assert "interrupted" in text.decode()
    assert b"fedsdg" in text


def test_once_and_as_json(unfinished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(unfinished), "--once"]) == 0
    assert "6 of 16 rounds" in capsys.readouterr().out
    assert main(["watch", str(unfinished), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert (content["state"], content["trials"][0]["latest"]["round"]) == ("interrupted", 2)


def listening(port: int) -> set[str]:
    """The addresses at which this machine listens on a port."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    found = {row[1] for row in rows if row[3] == "0A"}
    return {place.partition(":")[0] for place in found if int(place.partition(":")[2], 16) == port}


@pytest.mark.slow
@pytest.mark.parametrize(("address", "place"), [("0", "0100007F"), ("0.0.0.0:0", "00000000")])
def test_the_page_is_served_to_this_machine_unless_told_otherwise(
    unfinished: Path, address: str, place: str
) -> None:
    watch = start("watch", unfinished, "--serve", address, stderr=subprocess.PIPE)
    assert watch.stdout is not None
    said = watch.stdout.readline()
    url = said.split()[0]
    assert listening(int(url.rstrip("/").rpartition(":")[2])) == {place}
    with urlopen(f"{url.replace('0.0.0.0', '127.0.0.1')}state") as answer:
        assert json.load(answer)["name"] == "letters"
    watch.send_signal(signal.SIGINT)
    error = watch.communicate()[1]
    assert watch.returncode == 0
    assert ("whoever reaches this machine can read this page" in error) == (address != "0")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "--once"], "no directory 'nowhere'; give one that `fedtailor run` wrote"),
        (["RUN", "--serve", "x"], "--serve x: must be [HOST:]PORT with a port from 0 to 65535"),
        (["RUN", "--serve", "²"], "--serve ²: must be [HOST:]PORT"),
        (["RUN", "--serve", "80", "--json"], "leave out --once and --json"),
        (["RUN", "--serve", "--once"], "leave out --once and --json"),  # at the usual port
        (
            ["RUN", "--serve", "203.0.113.7:0"],
            "can't listen at 203.0.113.7:0: Cannot assign requested address",
        ),
    ],
)
def test_what_can_not_be_is_refused(
    unfinished: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["watch", *(str(unfinished) if text == "RUN" else text for text in arguments)]) == 2
    assert message in capsys.readouterr().err
