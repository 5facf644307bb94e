"""A deployment in real processes, started by its own commands, of which none is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedtailor.deploy.folder import init
from fedtailor.deploy.subprocesses import free_port

PATH = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.getenv("PYTHONPATH"))))
_PATIENCE = 600.0  # seconds; a machine may be busy with other things


def until(what: str, true: Callable[[], bool], seconds: float = _PATIENCE) -> None:
    """Wait for it."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"{what}: not in {seconds} s"
        time.sleep(0.2)


def is_running(pid: int) -> bool:
    """Whether a process has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class Live:
    """A deployment in ``folder``, and the processes of its commands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[Command] = []

    def deploy(
        self, step: str, *arguments: str, folder: Path | None = None, program: str = "fedtailor"
    ) -> Command:
        """Start ``fedtailor deploy STEP``, or another ``program`` with these arguments."""
        number = len(self.started)
        paths = [self.folder.parent / f"{number}-{step}.{name}" for name in ("out", "err")]
        command = [sys.executable, "-m", program, "deploy", step, str(folder or self.folder)]
        with paths[0].open("wb") as out, paths[1].open("wb") as err:
            process = subprocess.Popen(
                [*command, *arguments], stdout=out, stderr=err, cwd=self.folder.parent,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATH},
            )  # fmt: skip
        self.started.append(Command(step, process, *paths))
        return self.started[-1]

    def server(self, *arguments: str) -> Command:
        """The server, once it is ready."""
        command = self.deploy("server", *arguments)
        command.wait_for("ready at")
        return command

    def running(self, step: str) -> Command:
        """The one command of this name that has not ended."""
        (found,) = [c for c in self.started if c.step == step and c.process.poll() is None]
        return found

    def end(self) -> None:
        """Interrupt what runs; nothing that was started may be left."""
        for command in reversed(self.started):
            if command.process.poll() is None:
                command.process.send_signal(signal.SIGCONT)
                command.process.terminate()
        codes = [command.process.wait(60) for command in self.started]
        assert not self.processes(), [line for _, line in self.processes()]
        killed = {-signal.SIGKILL, -signal.SIGINT}  # the latter while Python starts
        assert set(codes) <= {0, 2, 130} | killed, codes

    def processes(self) -> list[tuple[int, str]]:
        """What runs of this deployment: number and command line."""
        found = []
        for path in Path("/proc").iterdir():
            if path.name.isdigit() and int(path.name) != os.getpid():
                try:
                    line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    place = (path / "environ").read_bytes().decode(errors="replace")
                except OSError:
                    continue
                if str(self.folder.parent) in line + place:
                    found.append((int(path.name), line))
        return found

    def lines(self, name: str, method: str) -> list[dict[str, Any]]:
        """A log of the run."""
        path = self.folder / "run/methods" / method / "seed-0" / f"{name}.jsonl"
        return list(map(json.loads, path.read_text().splitlines())) if path.exists() else []

    def round(self, method: str) -> int:
        """The last committed one."""
        path = self.folder / "run/methods" / method / "seed-0/commit.json"
        return int(json.loads(path.read_text())["round"]) if path.exists() else 0


class Command:
    """A command that runs, and what it has said."""

    def __init__(self, step: str, process: subprocess.Popen[bytes], out: Path, err: Path) -> None:
        self.step = step
        self.process = process
        self._paths = out, err

    @property
    def told(self) -> str:
        return "".join(path.read_text(errors="replace") for path in self._paths)

    def wait_for(self, text: str) -> None:
        until(text, lambda: text in self.told or self.process.poll() is not None)
        assert text in self.told, self.told[-2000:]

    def code(self, seconds: float = _PATIENCE) -> int:
        """Once it has ended."""
        return self.process.wait(seconds)

    def cpu_seconds(self) -> float:
        """Of it and of all that it has started."""
        ticks, left = 0, [self.process.pid]
        while left:
            place = Path(f"/proc/{left.pop()}")
            try:
                fields = (place / "stat").read_text().rpartition(")")[2].split()
                left += map(int, (place / f"task/{place.name}/children").read_text().split())
            except FileNotFoundError:  # it has ended
                continue
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def child(self, name: str) -> int:
        """The number of the Flower program that it started."""
        number = self.process.pid
        children = Path(f"/proc/{number}/task/{number}/children").read_text().split()
        lines = {int(child): Path(f"/proc/{child}/cmdline").read_bytes() for child in children}
        (found,) = [child for child, line in lines.items() if name.encode() in line]
        return found


@contextmanager
def live(folder: Path, experiment: str, sites: list[str]) -> Iterator[Live]:
    """A deployment; ended afterwards, whatever happens."""
    path = folder / "experiment.toml"
    path.write_text(experiment)
    init(folder / "dir", path, sites, f"127.0.0.1:{free_port()}")
    made = Live(folder / "dir")
    try:
        yield made
    finally:
        made.end()


class Recorder:
    """Hands bytes on between sites and a server, and keeps those that leave the sites."""

    def __init__(self, server: int, path: Path) -> None:
        self._server = server
        self._file = path.open("wb")
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]

    def start(self) -> None:
        import threading

        threading.Thread(target=self._serve, daemon=True).start()

    def stop(self) -> None:
        self._listening.close()
        self._file.close()

    def _serve(self) -> None:
        import threading

        while True:
            try:
                site, _ = self._listening.accept()
                server = socket.create_connection(("127.0.0.1", self._server))
            except OSError:
                return
            for pair in ((site, server, True), (server, site, False)):
                threading.Thread(target=self._copy, args=pair, daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket, keep: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if keep:
                    self._file.write(data)
                target.sendall(data)
        except (OSError, ValueError):
            pass
        finally:
            for end in (source, target):
                end.close()


PICTURES = """
    rounds = 40
    data = {name = "digits", classes = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]}
    model = {name = "cnn", pretrained = false, width = 1.0, image_size = 28}
    local = {batch_size = 4, steps = 1}
    engine = {executor = "sequential", device = "cpu"}
    evaluate = {every = 40, global_model = false, batch_size = 4}
    methods.lg-fedavg = {}
"""
