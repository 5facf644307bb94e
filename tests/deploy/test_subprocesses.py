"""Programs that are started, watched and ended; here shell scripts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import tomli_w

from fedtailor.deploy import subprocesses
from fedtailor.deploy.subprocesses import (
    CONNECTION,
    ProgramEndedError,
    children_with,
    started,
    watched,
)
from fedtailor.errors import InputError
from tests.deploy.live import is_running, until

STAYS = "trap '' TERM; touch {ready}; sleep 60 & wait; wait"


def start_after(path: Path, timer: threading.Timer) -> None:
    """Start ``timer`` when ``path`` exists."""
    while not path.exists():
        time.sleep(0.01)
    timer.start()


def test_an_interrupt_counts_while_programs_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocesses, "_GRACE", 3.0)
    ready = tmp_path / "ready"
    command = ["sh", "-c", STAYS.format(ready=ready)]
    late: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda *at: late.append(at[0]))
    mine = signal.getsignal(signal.SIGTERM)
    interrupt = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
    try:
        with pytest.raises(KeyboardInterrupt), started(command, os.environ):
            start_after(ready, interrupt)
        assert signal.getsignal(signal.SIGTERM) == mine
    finally:
        interrupt.join()
        signal.signal(signal.SIGTERM, before)
    assert not late


def test_an_end_whose_signal_was_lost_is_noticed() -> None:
    def lose_the_signal() -> None:
        with started(["sh", "-c", "exit 3"], os.environ) as process, watched(process):
            handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
            signal.signal(signal.SIGCHLD, handler)
            time.sleep(20)

    with pytest.raises(ProgramEndedError, match="sh ended with code 3"):
        lose_the_signal()


@pytest.mark.slow
def test_a_program_that_ends_at_once_is_told_as_one() -> None:
    before = signal.getsignal(signal.SIGCHLD)
    for _ in range(50):
        with (
            pytest.raises(ProgramEndedError, match="sh ended with code 3, see above; the same"),
            started(["sh", "-c", "exit 3"], os.environ) as process,
            watched(process),
        ):
            time.sleep(1)
        assert signal.getsignal(signal.SIGCHLD) == before


def lose_helper(pid: int, seconds: float) -> None:
    """Kill what ``pid`` has started after some time; then wait."""
    while not (found := children_with(pid, "the-helper")):
        time.sleep(0.05)
    time.sleep(seconds)
    os.kill(found[0], signal.SIGKILL)
    time.sleep(30)


@pytest.mark.parametrize("seconds", [0.0, 1.5])  # before and after it was seen
def test_a_program_that_has_lost_its_helper_is_ended(
    seconds: float, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    helper = tmp_path / "the-helper"
    helper.write_text("#!/bin/sh\nsleep 60")
    helper.chmod(0o700)
    program = tmp_path / "program.py"
    program.write_text(
        f"import subprocess, time; p = subprocess.Popen([{str(helper)!r}]); time.sleep(60)"
    )
    command = [sys.executable, str(program)]  # which does not notice
    with (
        pytest.raises(ProgramEndedError, match="was killed by signal 15"),
        started(command, os.environ) as process,
        watched(process, "the-helper"),
    ):
        lose_helper(process.pid, seconds)
    assert "the-helper has ended; ending the program" in capfd.readouterr().err


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocesses, "_ANSWER", 8.0)
    env = subprocesses.environment(tmp_path)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # and never accept
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        server = {"address": address, "insecure": True}
        content = {"superlink": {"default": CONNECTION, CONNECTION: server}}
        (tmp_path / "flower" / "config.toml").write_text(tomli_w.dumps(content))
        with pytest.raises(InputError, match="no answer within 8 s; the server must run"):
            subprocesses.ask(["list", CONNECTION], env)


ASKING = """
import sys
from fedtailor.deploy.subprocesses import ask
ask(["run"], {"PATH": sys.argv[1]})
"""


def test_a_question_ends_with_the_command_that_was_killed(tmp_path: Path) -> None:
    """Otherwise it would start a run at a server that comes back."""
    program, number = tmp_path / "flwr", tmp_path / "number"
    lines = "#!/bin/sh", f"echo $$ > {number}.new", f"mv {number}.new {number}", "exec sleep 60"
    program.write_text("\n".join(lines))
    program.chmod(0o700)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    command = subprocess.Popen([sys.executable, "-c", ASKING, path])
    until("it asks", number.exists)
    command.kill()
    command.wait()
    until("it ends", lambda: not is_running(int(number.read_text())), 20)


WAITING = """
import os, socket, sys
from fedtailor.deploy.subprocesses import started, watched
with started(["sleep", "60"], os.environ) as process, watched(process, "the-helper"):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print("ready", flush=True)
        listening.accept()
"""


@pytest.mark.slow
def test_a_command_that_is_stopped_ends_when_it_was_told_to() -> None:
    """Whichever of its threads gets the signal as it goes on."""
    for _ in range(5):
        command = subprocess.Popen(
            [sys.executable, "-c", WAITING], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert command.stdout is not None
        assert command.stdout.readline() == b"ready\n"
        for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGCONT):
            command.send_signal(number)
            time.sleep(0.2)
        try:
            assert command.wait(30) != 0
        finally:
            command.kill()
            command.communicate()


_PARENT = """
import os, signal, sys, time
from fedtailor.deploy.subprocesses import end_after_parent
if pid := os.fork():
    print(pid, flush=True)
    time.sleep(60)
signal.signal(signal.SIGINT, signal.SIG_IGN)  # the interrupt that Flower sends is lost
end_after_parent(0.1)
time.sleep(60)
"""


def test_an_app_does_not_outlive_its_parent() -> None:
    command = [sys.executable, "-c", _PARENT]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    app = int(parent.stdout.readline())
    time.sleep(1.0)
    assert is_running(app)
    parent.kill()
    parent.communicate()
    until("the app ends", lambda: not is_running(app), 30.0)
