"""A run directory as a whole: its lock, its id, and what may be removed."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO

from ..errors import InputError
from .files import make_folder, read_json

LOG = "run.log"

# all that a run directory holds; a command that writes something else there adds it here
OWN_FILES = frozenset({
    ".lock", "environment.json", "experiment.json", "factory", "methods", "model.json", "metrics",
    "partitions", "report.html", "run.log", "tensorboard", "trace.json.gz",
})  # fmt: skip

_GLANCE = 1.0  # seconds; who looks whether a run goes on holds the lock for far less
_locks: set[IO[str]] = set()  # of this process


# a forked process would hold its parent's locks for as long as it lives
os.register_at_fork(after_in_child=lambda: [file.close() for file in _locks])


def log_lines(texts: Iterable[str]) -> str:
    """Lines of run.log, with the time."""
    now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    return "".join(f"{now}  {text}\n" for text in texts)


def check_removable(out: Path) -> None:
    """Raise InputError unless ``out`` is a run directory, or empty, and holds nothing else."""
    if not (out / "experiment.json").is_file():
        if out.exists() and (not out.is_dir() or {p.name for p in out.iterdir()} - {".lock"}):
            raise InputError(f"{out} is not a run directory: --overwrite removes nothing else")
        return
    if not {"methods", "rounds", "seeds"} <= read_json(out / "experiment.json").keys():
        raise InputError(f"{out} is not a run directory: --overwrite removes nothing else")
    others = sorted(
        path.name
        for path in out.iterdir()
        if path.name.removesuffix(".new") not in OWN_FILES or path.is_symlink()
    )
    if others:
        raise InputError(
            f"{out} holds {', '.join(others)} beside the run: --overwrite removes nothing but runs"
        )


def remove_run(out: Path) -> None:
    """Remove what `check_removable` allows; the mark of a run goes last, the folder stays."""
    if not out.exists():
        return
    with locked(out):
        check_removable(out)
        for path in sorted(out.iterdir(), key=lambda path: path.name == "experiment.json"):
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != ".lock":
                path.unlink()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold ``folder`` for this process alone; InputError where another one is writing there."""
    import fcntl

    make_folder(folder)
    with (folder / ".lock").open("w") as file:
        end = time.monotonic() + _GLANCE
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise InputError(f"another process is writing to {folder}") from None
                time.sleep(_GLANCE / 20)
        _locks.add(file)
        try:
            yield
        finally:
            _locks.discard(file)
