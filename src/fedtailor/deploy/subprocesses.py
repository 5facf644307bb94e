"""Flower's programs as child processes, which end with the process that starts them."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from ..errors import InputError, announce

CONNECTION = "deployment"  # the server's name in Flower's configuration
FOLDER = "FEDTAILOR_DEPLOYMENT"  # environment variable: the deployment's folder
SITE = "FEDTAILOR_SITE"  # environment variable: the socket of the site's process
MOST_PARTS = "FEDTAILOR_MOST_PARTS"  # environment variable: of a message that a site sends
PARTS = 4096  # so many beside some for each client; a part has at most 5 MiB
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_INTERRUPTS = signal.SIGINT, signal.SIGTERM
_GRACE = 10.0  # seconds for a program to end by itself
_START = 300.0  # seconds for a program to answer; the machine may be busy
_ANSWER = 180.0  # seconds for an answer of the flwr command
_LOOK = 1.0  # seconds between looks at a program's helper


class ProgramEndedError(InputError):
    """A program has ended that should run; ``reason`` has its name and its code or signal."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; the same command starts it again")
        self.reason = reason


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """Return the environment of Flower's programs: no telemetry, Flower's files in the subfolder
    ``flower`` of ``folder``, and more ``variables``."""
    (folder / "flower").mkdir(parents=True, exist_ok=True)
    scripts = str(Path(sys.executable).parent)  # Flower's programs start each other by name
    return {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        **os.environ,
        "FLWR_HOME": str(folder / "flower"),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "PATH": os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)]),
        **variables,
    }


def end_after_parent(seconds: float = _GRACE) -> None:
    """End this process when it has outlived its parent for some seconds. Flower interrupts it then,
    which a library may catch: it would ask a server that is gone for ever."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK)
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _end_with_parent(number: int = signal.SIGTERM) -> None:
    _prctl(_PR_SET_PDEATHSIG, number)


@contextmanager
def started(
    command: Sequence[str],
    env: Mapping[str, str],
    name: str = "",
    *,
    is_read: bool = False,
    if_killed: int = signal.SIGTERM,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program, called ``name`` in messages, inside the ``with`` statement; at its end, end
    all processes that it started. Inside, SIGTERM interrupts as SIGINT does. Needs Linux.

    Its output is a log, and goes to stderr, unless the caller reads it (``is_read``). If this
    process is killed, it gets the signal ``if_killed``. Raises ProgramEndedError where it has ended
    inside `watched`."""
    signals: list[int] = []
    ending = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        if not ending:
            raise KeyboardInterrupt

    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # so that a grandchild without a parent becomes a child
    numbers = *_INTERRUPTS, signal.SIGCHLD
    old_handlers = [signal.getsignal(number) for number in numbers]
    for number in _INTERRUPTS:
        signal.signal(number, interrupt)
    others = _children()
    process = subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if is_read else sys.stderr,
        stderr=subprocess.STDOUT if is_read else None,
        start_new_session=True, preexec_fn=partial(_end_with_parent, if_killed),
    )  # fmt: skip
    try:
        yield process
    except KeyboardInterrupt:
        if signals:
            raise
        code = process.wait()
        end = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}, see above"
        raise ProgramEndedError(f"{name or Path(command[0]).name} {end}") from None
    finally:
        ending = True  # this may take some seconds
        _end_all(process, others)
        for number, handler in zip(numbers, old_handlers, strict=True):
            signal.signal(number, handler)
        if signals:
            raise KeyboardInterrupt


@contextmanager
def interrupts_later() -> Iterator[None]:
    """Delay the interrupts by SIGINT and SIGTERM until the end of the ``with`` statement. Raises
    KeyboardInterrupt at the end, if there was an interrupt."""
    signals: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        signals.append(number)

    old_handlers = [signal.signal(number, note) for number in _INTERRUPTS]
    try:
        yield
    finally:
        for number, handler in zip(_INTERRUPTS, old_handlers, strict=True):
            signal.signal(number, handler)
    if signals:
        raise KeyboardInterrupt


@contextmanager
def watched(process: subprocess.Popen[bytes], helper: str = "") -> Iterator[None]:
    """Interrupt the ``with`` statement, which stands inside `started`, when the program ends; it is
    ended where a program called ``helper`` has ended, which it starts once and can't do without."""
    interrupted = False
    over = threading.Event()

    def child_ended(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if not interrupted and process.poll() is not None:
            interrupted = True  # a second interrupt could hit the end of a with statement
            raise KeyboardInterrupt

    old_handler = signal.getsignal(signal.SIGCHLD)
    try:
        signal.signal(signal.SIGCHLD, child_ended)
        if process.poll() is None:
            threading.Thread(target=_watch, args=(process, helper, over), daemon=True).start()
            yield
            process.wait()
    finally:
        over.set()
        signal.signal(signal.SIGCHLD, old_handler)
    raise KeyboardInterrupt


def _watch(process: subprocess.Popen[bytes], helper: str, over: threading.Event) -> None:
    """End the program once its ``helper`` is gone, if there is one, even if that was never seen
    alive. And signal the end of the program again: the signal of a child's end is lost on a main
    thread that gets it just before it waits for a connection, say, or if another thread gets it."""
    # a thread that gets a signal would not wake the main thread, which handles it
    signal.pthread_sigmask(signal.SIG_BLOCK, {*_INTERRUPTS, signal.SIGCHLD})
    was_there = ending = False
    while not over.wait(_LOOK):
        if _has_ended(process):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGCHLD)
        if not helper or ending:
            continue
        is_there = bool(children_with(process.pid, helper))
        is_gone = not is_there and (was_there or _is_defunct(process.pid, helper))
        if is_gone and process.returncode is None:
            announce(f"{helper} has ended; ending the program that can't go on without it")
            process.terminate()
            ending = True
        was_there = was_there or is_there


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether the process has ended; unlike `poll` it leaves the code to who waits for it."""
    with suppress(ChildProcessError):  # it has been waited for
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, process.pid, how) is not None
    return True


def children_with(pid: int, text: str) -> list[int]:
    """Return the numbers of a process's running children with ``text`` in their command line."""
    found = []  # the command line of a child that has ended is empty
    for child in _children(pid):
        with suppress(OSError):
            if text.encode() in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(child)
    return found


def _is_defunct(pid: int, program: str) -> bool:
    """Whether a child of a process, a ``program``, has ended and was not waited for."""
    for child in _children(pid):
        with suppress(OSError):  # it has been waited for
            name, _, fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")
            if name.partition("(")[2] == program[:15] and fields.split()[0] == "Z":
                return True
    return False


def _end_all(process: subprocess.Popen[bytes], others: Collection[int]) -> None:
    """End the process and what has become a child since it was started; not ``others``."""
    process.terminate()
    try:
        process.wait(_GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    end = time.monotonic() + _GRACE
    while children := [child for child in _children() if child not in others]:
        number = signal.SIGTERM if time.monotonic() < end else signal.SIGKILL
        for child in children:
            os.kill(child, number)
        time.sleep(0.1)
        for child in children:
            os.waitpid(child, os.WNOHANG)


def _children(pid: int | None = None) -> list[int]:
    """The numbers of a process's children, of this one's by default."""
    children: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):  # the process has ended
        for task in Path(f"/proc/{pid or 'self'}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                children += map(int, (task / "children").read_text().split())
    return children


def wait_for(port: int) -> None:
    """Wait until a program listens at ``port`` of this machine."""
    end = time.monotonic() + _START
    while time.monotonic() < end:
        if answers_at(port):
            return
        time.sleep(0.1)
    raise InputError(f"no program answers at port {port} within {_START:g} s")


def answers_at(port: int) -> bool:
    """Return whether a program listens at ``port`` of this machine."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def ask(arguments: Sequence[str], env: Mapping[str, str]) -> Any:
    """Run ``flwr ARGUMENTS --format json``, and return its output; InputError for an error, or if
    it does not end: Flower tries for ever to reach a server that is gone."""
    try:
        completed = subprocess.run(
            ["flwr", *arguments, "--format", "json"], env=env, capture_output=True, text=True,
            stdin=subprocess.DEVNULL, check=False, start_new_session=True,  # without our Ctrl-C
            preexec_fn=_end_with_parent, timeout=_ANSWER,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise InputError(
            f"flwr {' '.join(arguments[:2])}: no answer within {_ANSWER:g} s; the server must run: "
            "fedtailor deploy server"
        ) from None
    start = completed.stdout.find("{")
    try:
        output = json.loads(completed.stdout[start:])
    except ValueError:
        text = " ".join((completed.stderr or completed.stdout).split())
        raise InputError(f"flwr {' '.join(arguments[:2])}: {text}") from None
    if not output.get("success", True):
        raise InputError(f"flwr {' '.join(arguments[:2])}: {output.get('error-message')}")
    return output


def check_port(host: str, port: int) -> None:
    """Raise InputError if no program can listen at ``port`` of ``host``."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise InputError(f"port {port} can't be used: {error.strerror}") from None


def free_port() -> int:
    """Return a port that no program uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
