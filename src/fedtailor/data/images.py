"""Images as one array: from IDX files, a Hugging Face image column, or an array of any type."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import disk_cache
from ..errors import InputError, naming
from ..temporary_folder import temporary_folder
from .pixels import GREY, opened, pixels
from .table import Images

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")

_LARGE = 512  # pixels of a side: larger pictures take much room
_SIDE = 224  # that most models read
_FORMAT = 2  # version of the cached files; part of their key


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read an IDX file of bytes, gzipped if its name ends in ``.gz``. Raises InputError where it is
    none, or truncated."""
    content = path.read_bytes()
    try:
        data = gzip.decompress(content) if path.suffix == ".gz" else content
        if data[:3] != b"\0\0\x08":
            raise ValueError("it begins otherwise")
        shape = struct.unpack_from(f">{data[3]}I", data, 4)
        return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape)
    except (gzip.BadGzipFile, EOFError, IndexError, ValueError, struct.error) as error:
        raise InputError(f"{path} is not a whole IDX file of bytes: {error}") from error


def decode(table: Any, column: str, side: int | None = None) -> NDArray[np.uint8]:
    """Decode the images of a ``datasets.Dataset`` column, as `pixels.pixels` does, into uint8
    ``[N, C, H, W]``, memory-mapped.

    They are decoded once, into ``images/HASH/`` of the cache, by a hash of the encoded files. The
    column's mode, or else the first image, decides whether all are grey (C = 1) or in colour
    (C = 3). With a ``side`` all become squares of so many pixels (bilinear), whatever their size.
    Raises InputError where one can't be read; they differ in size, or a colour image follows a grey
    one."""
    from datasets import Image

    wanted = table.features[column].mode
    table = table.select_columns([column]).cast_column(column, Image(decode=False))
    head = bytes([_FORMAT]) + str(wanted).encode() + (b"" if side is None else b"%d" % side)
    key = disk_cache.hash_of(head, (data for _, data in _encoded(table, column)))
    folder = disk_cache.cache_dir() / "images" / key
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(f".{folder.name}-", folder.parent) as stage:
            with naming(folder):
                _write(table, column, wanted, side, stage / "values.npy")
            disk_cache.publish(stage, folder)
    values: NDArray[np.uint8] = np.load(folder / "values.npy", mmap_mode="r")
    return values


def side_for(table: Any, column: str) -> int | None:
    """Return the pixels of the squares that a column's pictures are best made; None where all have
    one size, and no large one. Raises InputError where one can't be read."""
    from datasets import Image as Pictures
    from PIL import ExifTags, Image, UnidentifiedImageError

    table = table.select_columns([column]).cast_column(column, Pictures(decode=False))
    sizes = []
    for name, data in _encoded(table, column):
        try:
            with Image.open(BytesIO(data)) as image:
                is_turned = image.getexif().get(ExifTags.Base.Orientation, 1) > 4
                sizes.append(image.size[::-1] if is_turned else image.size)
        except UnidentifiedImageError:
            opened(data, name)  # says why
    if len(set(sizes)) < 2 and max(map(max, sizes), default=0) <= _LARGE:
        return None
    shorter = sorted(map(min, sizes))
    return min(_SIDE, shorter[len(shorter) // 2])


def _encoded(table: Any, column: str) -> Iterator[tuple[str, bytes]]:
    """The files of a column, each with what a message calls it."""
    for number, row in enumerate(table):
        image = row[column] or {}
        data, path = image.get("bytes"), image.get("path")
        file = "" if not path else f" ({path})" if data is None else f" ({Path(path).name})"
        name = f"row {number} of column {column!r}{file}"
        if data is None and path is None:
            raise InputError(f"{name} has no picture; leave the row out")
        try:
            yield name, Path(str(path)).read_bytes() if data is None else data
        except OSError as error:
            raise InputError(f"{name}: can't read {path}: {error.strerror}") from None


def _write(table: Any, column: str, wanted: str | None, side: int | None, path: Path) -> None:
    values: Any = None
    first: Any = None
    is_grey = wanted in GREY
    for number, (name, data) in enumerate(_encoded(table, column)):
        image = opened(data, name)
        if values is None:
            first, is_grey = image, is_grey or (wanted is None and image.mode in GREY)
            height, width = side or image.height, side or image.width
            shape = (len(table), 1 if is_grey else 3, height, width)
            values = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=shape)
        if is_grey and wanted is None and image.mode not in GREY:
            raise InputError(
                f"pictures must all be grey, as row 0 is, or the first one in colour: {name} is "
                f"{image.mode}"
            )
        if image.size != first.size and side is None:
            raise InputError(
                f"pictures must have one size: {name} is {image.width}x{image.height}, row 0 is "
                f"{first.width}x{first.height}; data.picture_size = {min(first.size)}, or another "
                "number of pixels, makes all squares of it"
            )
        one = pixels(image, values.shape[1], name)[None]
        values[number] = Images(one).resized(height, width).values[0]
    if values is not None:
        values.flush()


def picture_array(array: NDArray[Any], name: str) -> NDArray[Any]:
    """Return pictures as uint8, or as float32 if they are floats.

    Bits become 0 and 255, and 16 bits are scaled from 0 to 65,535; other whole numbers are bytes.
    Raises InputError where values are of another kind, or out of range."""
    kind, dtype = array.dtype.kind, array.dtype
    if kind == "f":
        with np.errstate(over="ignore"):
            array = array.astype(np.float32)
        if not np.isfinite(array).all():
            raise InputError(f"{name} hold values that are not finite")
        return array
    if kind == "b":
        return array.astype(np.uint8) * 255
    if kind not in "ui":
        raise InputError(f"{name} are {dtype}; pictures are whole numbers or floats")
    low, high = array.min(initial=0), array.max(initial=0)
    is_deep = kind == "u" and dtype.itemsize == 2
    if is_deep and high > 255:
        return np.rint(array * (255 / 65535)).astype(np.uint8)
    if low < 0 or high > 255 or (is_deep and high > 0):
        raise InputError(
            f"{name} are {dtype} with values from {low} to {high}, of an unknown range; allowed: "
            "uint8, uint16 to 65535, other whole numbers from 0 to 255, or floats as the model "
            "reads them"
        )
    return array.astype(np.uint8)
