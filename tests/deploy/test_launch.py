"""What is done with Flower's programs, here a shell script in their place."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from fedtailor.deploy.folder import open_folder
from fedtailor.deploy.launch import run
from tests.deploy.test_folder import made

FLOWER = """#!/bin/sh
echo "$@" >> {log}
[ "$1" = run ] && kill -{signal} $PPID
echo '{{"run-id": 7}}'
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_whose_start_is_interrupted_is_stopped(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = open_folder(made(tmp_path))
    config = deployment.server / "flower/config.toml"
    config.parent.mkdir(parents=True)
    config.touch()
    program, log = tmp_path / "bin/flwr", tmp_path / "log"
    program.parent.mkdir()
    program.write_text(FLOWER.format(log=log, signal=number.name.removeprefix("SIG")))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(deployment)
    started, stopped = log.read_text().splitlines()
    assert started.startswith(f"run {deployment.folder} ")
    assert stopped.startswith("stop 7 ")
    assert before == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
