"""Run an experiment and keep what a disk would hold after a power loss before each durable step.

``python -m tests.power_loss FOLDER [N]`` tries each N-th of them. A disk holds a file's bytes as of
its last fsync. Of names it holds those as of the last fsync of their folder or, since it may
write them earlier, those of now; both are tried. A program of its own, so that it can fork before
PyTorch has started threads. Prints how many different disks were tried; exits with 1 if a run that
goes on from one ends with other bytes than the undisturbed run, or has lost a round that had been
committed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

from tests.forked import contents
from tests.kill_everywhere import STEPS, in_child, run

Disk = dict[str, bytes]  # files by name


class Recorder:
    """Follows a run into ``out``: the disks that it could leave, each with the committed round."""

    def __init__(self, out: Path) -> None:
        self.out, self.synced = out, dict[int, bytes]()  # by inode
        self.names: dict[Path, dict[str, int]] = {}  # of folders that were synced
        self.disks: list[tuple[Disk, int]] = []
        self.kept: list[IO[bytes]] = []

    def step(self, real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """``real``, and before it what a power loss would leave."""
        if self.out.is_dir():
            self.take()
        if real is not FSYNC:  # keep its inode from being given to another file
            gone = Path(arguments[-1])
            self.kept += [gone.open("rb")] if gone.is_file() else []
        done = real(*arguments, **named)
        if real is FSYNC:
            path = Path(f"/proc/self/fd/{arguments[0]}").resolve()
            if path.is_dir():
                self.names[path] = {p.name: p.stat().st_ino for p in path.iterdir()}
            elif self.out in path.parents:
                self.synced[path.stat().st_ino] = path.read_bytes()
        return done

    def take(self) -> None:
        now = [path for path in self.out.rglob("*") if path.is_file()]
        early = {str(p.relative_to(self.out)): self.synced.get(p.stat().st_ino, b"") for p in now}
        for disk in (early, dict(self.late(self.out))):
            if not self.disks or all(disk != other for other, _ in self.disks[-4:]):
                self.disks.append((disk, committed(self.out)))

    def late(self, folder: Path) -> Any:
        for name, inode in self.names.get(folder, {}).items():
            if folder / name in self.names or (folder / name).is_dir():
                yield from self.late(folder / name)
            else:
                yield str((folder / name).relative_to(self.out)), self.synced.get(inode, b"")


FSYNC = os.fsync


def committed(out: Path) -> int:
    commit = out / "methods/fedsdg/seed-1/commit.json"
    return json.loads(commit.read_text())["round"] if commit.exists() else 0


def recorded(folder: Path) -> None:
    """The disks, written out."""
    recorder = Recorder((folder / "run").resolve())
    for name in STEPS:
        setattr(os, name, partial(recorder.step, getattr(os, name)))
    run("best-rounds", recorder.out)
    for number, (disk, last) in enumerate(recorder.disks):
        out = folder / str(number)
        for name, content in disk.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_bytes(content)
        (folder / f"{number}.txt").write_text(str(last))


def main(folder: Path, every: int) -> None:
    assert in_child(lambda: run("best-rounds", folder / "whole")) == 0
    assert in_child(lambda: recorded(folder)) == 0
    notes = sorted(folder.glob("*.txt"), key=lambda path: int(path.stem))[::every]
    for note in notes:
        out = note.with_suffix("")
        if committed(out) < int(note.read_text()) - 1:
            sys.exit(f"{out} has lost round {note.read_text()}")
        assert in_child(lambda to=out: run("best-rounds", to)) == 0, f"{out} does not go on"
        if contents(out) != contents(folder / "whole"):
            sys.exit(f"{out} ends with other bytes")
    print(len(notes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1)
