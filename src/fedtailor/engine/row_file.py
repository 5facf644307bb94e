"""A safetensors file of tensors ``[n, ...]``, read and written by rows.

The file is valid at every moment: its header is written first, and only rows that have been
written take room on disk. Rows are read and written at their place, not through a memory map: what
a process has touched of a map counts as its memory, and grows with the number of clients seen.
"""

from __future__ import annotations

import json
import os
import struct
import weakref
from pathlib import Path

import torch
from torch import Tensor

from ..params import Params

_NAMES = {
    torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class RowFile:
    """The file at ``path``, of ``num_rows`` rows that are each like ``example``."""

    def __init__(self, path: Path, num_rows: int, example: Params) -> None:
        """Open the file; made, with all rows zero, if it is not there."""
        self._path = path
        # the widest first, so that every tensor is aligned
        self._row = dict(sorted(example.items(), key=lambda item: -item[1].element_size()))
        header, end = {}, 0
        for name, value in self._row.items():
            start, end = end, end + num_rows * _nbytes(value)
            header[name] = {
                "dtype": _NAMES[value.dtype],
                "shape": [num_rows, *value.shape],
                "data_offsets": [start, end],
            }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        if not path.exists():
            fresh = path.with_suffix(".new")
            with fresh.open("wb") as file:
                file.write(struct.pack("<Q", len(text)) + text)
                file.truncate(8 + len(text) + end)
            fresh.replace(path)
        self._start = {n: 8 + len(text) + about["data_offsets"][0] for n, about in header.items()}
        self._descriptor = os.open(path, os.O_RDWR)
        weakref.finalize(self, os.close, self._descriptor)

    def read(self, index: int, *names: str) -> Params:
        """The tensors of one row: those of ``names``, or all if there are none."""
        row = {}
        for name in names or self._row:
            like = self._row[name]
            row[name] = torch.empty(like.shape, dtype=like.dtype)
            if like.numel():
                data, place = _bytes(row[name]), self._start[name] + index * _nbytes(like)
                while data:
                    done = os.preadv(self._descriptor, [data], place)
                    if not done:
                        raise OSError(f"{self._path} ends within row {index}")
                    data, place = data[done:], place + done
        return row

    def write(self, first: int, rows: Params) -> None:
        """Set the rows from ``first`` on: ``rows`` ``[m, ...]``."""
        for name, value in rows.items():
            like = self._row[name]
            data, place = _bytes(value.to(like.dtype)), self._start[name] + first * _nbytes(like)
            while data:
                done = os.pwrite(self._descriptor, data, place)
                data, place = data[done:], place + done

    def prefetch(self, index: int) -> None:
        """Have the kernel fetch a row from the disk in the background, where it can (not macOS)."""
        if not hasattr(os, "posix_fadvise"):
            return
        for name, like in self._row.items():
            place = self._start[name] + index * _nbytes(like)
            os.posix_fadvise(self._descriptor, place, _nbytes(like), os.POSIX_FADV_WILLNEED)

    def sync(self) -> None:
        """Bring what was written to the disk."""
        os.fsync(self._descriptor)


def sync_folder(folder: Path) -> None:
    """Bring the names of new files in ``folder`` to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def _nbytes(value: Tensor) -> int:
    return value.numel() * value.element_size()


def _bytes(value: Tensor) -> memoryview:
    return value.contiguous().view(-1).view(torch.uint8).numpy().data
