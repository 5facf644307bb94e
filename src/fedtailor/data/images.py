"""Images as one uint8 array: from IDX files, or from a Hugging Face image column."""

from __future__ import annotations

import gzip
import hashlib
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import disk_cache
from ..errors import InputError, naming
from ..temporary_folder import temporary_folder

_FORMAT = 1  # version of the cached files; part of their key
_GREY = ("1", "L", "LA")


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read an IDX file of bytes, gzipped if its name ends in ``.gz``.

    Raises:
        InputError: the file isn't one, or is truncated.
    """
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError) as error:
        raise InputError(f"{path} is not a whole gzip file: {error}") from error
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise InputError(f"{path} is not an IDX file of bytes")
    start = 4 + 4 * data[3]
    if len(data) < start:
        raise InputError(f"{path} is truncated: its header of {start} bytes has only {len(data)}")
    shape = struct.unpack(f">{data[3]}I", data[4:start])
    values = np.frombuffer(data, np.uint8, offset=start)
    if values.size != np.prod(shape, dtype=np.int64):
        raise InputError(f"{path} has {values.size} bytes of data, its header says {shape}")
    return values.reshape(shape)


def decode(table: Any, column: str, cache: Path) -> NDArray[np.uint8]:
    """Decode the images of a ``datasets.Dataset`` column.

    They are decoded once, into ``cache/images/HASH/``; the hash is over the encoded files. The
    first image decides whether all are grey (C = 1) or in colour (C = 3).

    Returns:
        uint8 ``[N, C, H, W]``, memory-mapped.

    Raises:
        InputError: the images differ in size, or a colour image follows a grey one.
    """
    folder = cache / "images" / _key(table, column)
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(f".{folder.name}-", folder.parent) as stage:
            with naming(folder):
                _write(table, column, stage / "values.npy")
            disk_cache.publish(stage, folder)
    values: NDArray[np.uint8] = np.load(folder / "values.npy", mmap_mode="r")
    return values


def _key(table: Any, column: str) -> str:
    from datasets import Image

    digest = hashlib.sha256(bytes([_FORMAT]))
    for row in table.select_columns([column]).cast_column(column, Image(decode=False)):
        data = row[column]["bytes"]
        data = Path(row[column]["path"]).read_bytes() if data is None else data
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:32]


def _write(table: Any, column: str, path: Path) -> None:
    first = table[0][column]
    mode = "L" if first.mode in _GREY else "RGB"
    shape = (len(table), len(mode), first.height, first.width)
    values = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=shape)
    for number, row in enumerate(table.select_columns([column])):
        image = row[column]
        if image.size != first.size or (mode == "L" and image.mode not in _GREY):
            raise InputError(
                f"images must have one size: row {number} of column {column!r} is "
                f"{image.width}x{image.height} {image.mode}, "
                f"row 0 is {first.width}x{first.height} {first.mode}"
            )
        pixels = np.asarray(image.convert(mode))
        values[number] = pixels.reshape(*pixels.shape[:2], -1).transpose(2, 0, 1)
    values.flush()
