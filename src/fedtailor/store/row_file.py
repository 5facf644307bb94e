"""A safetensors file of tensors ``[n, ...]``, read and written by rows.

The file is valid at every moment: its header is written first, and only rows that have been
written take room on disk. Rows are read and written at their place, not through a memory map: what
a process has touched of a map counts as its memory, and grows with the number of clients seen.
Every row has a checksum, so that damage is noticed when the row is read.
"""

from __future__ import annotations

import json
import os
import struct
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import naming
from ..params import DTYPES, Params
from .format import CHECKSUMS, columns, damaged, row_checksum, seal_header

_CHUNK = 1 << 16  # checksums that are read at a time
Number = TypeVar("Number", int, NDArray[np.int64])


class RowFile:
    """The file at ``path``, of ``num_rows`` rows that are each like ``example``."""

    def __init__(
        self, path: Path, num_rows: int, example: Params, *, checksums: bool = True
    ) -> None:
        """Open the file; made, with all rows zero, if it is not there. Without ``checksums`` rows
        are not checked. Raises InputError where the file that is there is damaged, or of other
        rows."""
        self._path, self._rows = path, num_rows
        self._row = _widest_first(example)
        more = {CHECKSUMS: torch.zeros((), dtype=torch.int64)} if checksums else {}
        whole = _widest_first({**example, **more})
        self._sizes = {name: _nbytes(value) for name, value in whole.items()}  # of a row
        header, places = _header(num_rows, whole)
        if not path.exists():
            self._make(header, max(end for _, end in places.values()))
        columns(path)  # checked
        self._has_checksums = checksums
        with path.open("rb") as file:
            if file.read(len(header)) != header:
                raise damaged(path, "its header is not that of these rows")
        self._start = {name: len(header) + start for name, (start, _) in places.items()}
        writable = os.access(path, os.W_OK)
        self._descriptor = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)

    @staticmethod
    def open(path: Path) -> RowFile:
        """Open a file that is there, with rows as its header says."""
        found = columns(path)
        dtypes = {name: dtype for dtype, name in DTYPES.items()}
        example = {
            name: torch.empty(about["shape"][1:], dtype=dtypes[about["dtype"]], device="meta")
            for name, about in found.items()
            if name != CHECKSUMS
        }
        return RowFile(path, next(iter(found.values()))["shape"][0], example)

    def _make(self, header: bytes, size: int) -> None:
        fresh = self._path.with_suffix(".new")
        with naming(fresh), fresh.open("wb") as file:
            file.write(header)
            file.truncate(len(header) + size)
            os.fsync(file.fileno())
        fresh.replace(self._path)

    def read(self, index: int) -> Params:
        """The tensors of one row. Raises InputError where the row is damaged."""
        row = {n: torch.empty(like.shape, dtype=like.dtype) for n, like in self._row.items()}
        parts = {name: _bytes(value) for name, value in row.items()}
        for name, part in parts.items():
            self._read(name, index, part)
        if self._has_checksums and row_checksum([*parts.values()]) != self.checksum(index):
            raise damaged(self._path, f"the checksum of row {index} does not match")
        return row

    def is_written(self, index: int) -> bool:
        """Whether a row has a checksum or a flag, which begins with ``__``: one that was never
        written has none, whatever else has become of its bytes."""
        for name in (name for name in self._row if name.startswith("__")):
            part = bytearray(self._sizes[name])
            self._read(name, index, memoryview(part))
            if any(part):
                return True
        return self.checksum(index) != 0

    def written(self) -> list[int]:
        """The rows that were ever written."""
        return [index for index in range(self._rows) if self.is_written(index)]

    def checksum(self, index: int) -> int:
        """The checksum of one row as the file has it; 0 for a row that was never written."""
        number = bytearray(8)  # a tensor would take five times as long
        if self._has_checksums:
            self._read(CHECKSUMS, index, memoryview(number))
        return int.from_bytes(number, "little", signed=True)

    def checksums(self) -> int:
        """One of all rows: the sum of their shares; 0 in a file without checksums."""
        total = 0
        if not self._has_checksums:
            return total
        for first in range(0, self._rows, _CHUNK):
            some = np.empty(min(_CHUNK, self._rows - first), np.int64)
            self._read(CHECKSUMS, first, some.view(np.uint8).data)
            total += int(some @ _weight(np.arange(first, first + len(some))))
        return total

    def share(self, index: int) -> int:
        """What a row adds to `checksums`, which counts modulo 2^64."""
        return self.checksum(index) * _weight(index)

    def share_of(self, index: int, rows: Params) -> int:
        """What the row would add if it were the one in ``rows`` ``[1, ...]``."""
        return row_checksum(self._parts(self._data(rows), 0)) * _weight(index)

    def _read(self, name: str, index: int, data: memoryview) -> None:
        place = self._place(name, index)
        while data:
            done = os.preadv(self._descriptor, [data], place)
            if not done:
                raise damaged(self._path, f"it ends within row {index}")
            data, place = data[done:], place + done

    def write(self, first: int, rows: Params) -> None:
        """Set the rows from ``first`` on: ``rows`` ``[m, ...]``. A tensor that is missing must be
        zero there, as in a row that was never written."""
        count = len(next(iter(rows.values())))
        data = self._data(rows)
        if self._has_checksums:
            numbers = [row_checksum(self._parts(data, at)) for at in range(count)]
            data[CHECKSUMS] = memoryview(struct.pack(f"<{count}q", *numbers))
        with naming(self._path):
            for name, part in data.items():
                self._write(name, first, part)

    def copy(self, index: int, source: RowFile) -> None:
        """Take over a row of another file of the same tensors, with its checksum. It is not
        checked: whoever reads the row does that."""
        with naming(self._path):
            for name in self._start:
                part = memoryview(bytearray(self._sizes[name]))
                source._read(name, index, part)
                self._write(name, index, part)

    def _write(self, name: str, index: int, data: memoryview) -> None:
        place = self._place(name, index)
        while data:
            done = os.pwrite(self._descriptor, data, place)
            data, place = data[done:], place + done

    def _place(self, name: str, index: int) -> int:
        return self._start[name] + index * self._sizes[name]

    def _data(self, rows: Params) -> dict[str, memoryview]:
        return {name: _bytes(value.to(self._row[name].dtype)) for name, value in rows.items()}

    def _parts(self, data: Mapping[str, memoryview], at: int) -> list[memoryview]:
        """The bytes of the row ``at`` of ``data``, in the order of the file."""
        sizes = [(name, self._sizes[name]) for name in self._row]
        return [
            data[name][at * size : (at + 1) * size] if name in data else memoryview(bytes(size))
            for name, size in sizes
        ]

    def prefetch(self, index: int) -> None:
        """Have the kernel fetch a row from the disk in the background, where it can (not macOS)."""
        if not hasattr(os, "posix_fadvise"):
            return
        for name, size in self._sizes.items():
            place = self._place(name, index)
            os.posix_fadvise(self._descriptor, place, size, os.POSIX_FADV_WILLNEED)

    def sync(self) -> None:
        """Bring what was written to the disk."""
        with naming(self._path):
            os.fsync(self._descriptor)


def _widest_first(row: Params) -> Params:
    """The tensors in an order in which every one is aligned."""
    return dict(sorted(row.items(), key=lambda item: -item[1].element_size()))


def _header(rows: int, row: Params) -> tuple[bytes, dict[str, tuple[int, int]]]:
    """A file's start, with a checksum if rows have them, and each tensor's place behind it."""
    places, end = {}, 0
    for name, value in row.items():
        places[name] = end, end + rows * _nbytes(value)
        end = places[name][1]
    names = ("dtype", "shape", "data_offsets")
    about = {n: (DTYPES[v.dtype], [rows, *v.shape], places[n]) for n, v in row.items()}
    text = json.dumps({n: dict(zip(names, of, strict=True)) for n, of in about.items()}).encode()
    if CHECKSUMS in row:
        return seal_header(text), places
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, places


def _weight(row: Number) -> Number:
    """An odd number for each row, so that rows that are exchanged change the sum."""
    return 2 * row + 1


def _nbytes(value: Tensor) -> int:
    return value.numel() * value.element_size()


def _bytes(value: Tensor) -> memoryview:
    return value.contiguous().view(-1).view(torch.uint8).numpy().data
