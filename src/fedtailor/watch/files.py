"""What is new in the files of a run that goes on, and whether it does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mark:
    """Which version of a file this is; its time is in nanoseconds."""

    time: int
    size: int
    number: int


def mark_of(path: Path) -> Mark | None:
    """The version of a file; None if it is not there."""
    try:
        about = path.stat()
    except FileNotFoundError:
        return None
    return Mark(about.st_mtime_ns, about.st_size, about.st_ino)


class Lines:
    """The whole lines that a file has got since the last look, at first those of its ``tail``."""

    def __init__(self, path: Path, tail: int | None = None) -> None:
        self.path, self._tail = path, tail
        self.begins_anew = False  # whether the last look found another file than the one before
        self._place: int | None = None  # how far it is read
        self._number = 0  # of the file that was read

    def new(self) -> list[bytes]:
        """The new lines."""
        mark, self.begins_anew = mark_of(self.path), False
        if mark is None:
            return []
        is_other = mark.number != self._number or mark.size < (self._place or 0)
        self._number = mark.number
        if self._place is not None and is_other:
            self._place, self.begins_anew = 0, True
        if mark.size == self._place:
            return []
        with self.path.open("rb") as file:
            if self._place is None:
                self._place = 0
                if self._tail is not None and mark.size > self._tail:
                    file.seek(mark.size - self._tail)
                    file.readline()  # the rest of a line
                    self._place = file.tell()
            file.seek(self._place)
            content = file.read()
        end = content.rfind(b"\n") + 1
        self._place += end
        return content[:end].splitlines()


def is_written(run: Path) -> bool:
    """Whether a process writes to the run directory, so that it holds the lock."""
    import fcntl

    try:
        file = (run / ".lock").open("rb")
    except (FileNotFoundError, NotADirectoryError):
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
