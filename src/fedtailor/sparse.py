"""The parts of a sparse file that take room on the disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator


def stored_parts(file: int) -> Iterator[tuple[int, int]]:
    """Where each part of an open file begins and ends that takes room; zeros lie between them."""
    size = os.fstat(file).st_size
    start = _next_data(file, 0, size)
    while start < size:
        end = os.lseek(file, start, os.SEEK_HOLE)
        yield start, end
        start = _next_data(file, end, size)


def _next_data(file: int, start: int, size: int) -> int:
    """Where the next bytes are that take room; ``size`` if there are none."""
    try:
        return os.lseek(file, start, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return size
