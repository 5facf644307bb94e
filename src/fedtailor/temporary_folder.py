"""Temporary folders that a kill leaves, and the next one with the same purpose removes."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOCKED_WITHIN = 1.0  # seconds after a folder was made


@contextmanager
def temporary_folder(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """A new folder in ``parent`` (None: the folder for temporary files) that is removed in the end,
    unless it was renamed. Its name begins with ``prefix``, which nothing else there has. Those that
    killed processes have left are removed first: nobody holds their lock."""
    import fcntl

    parent = Path(tempfile.gettempdir()) if parent is None else parent
    for old in parent.iterdir():
        if not old.name.startswith(prefix):
            continue
        with suppress(OSError):
            if time.time() - old.stat().st_mtime > _LOCKED_WITHIN:
                lock = os.open(old, os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(old)
                finally:
                    os.close(lock)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)
