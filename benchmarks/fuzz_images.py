"""Pictures of every mode, depth and byte order: read with the right mean, or refused in a line."""

from __future__ import annotations

import random
import struct
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedtailor.data.pixels import GREY, opened, pixels

from .mutations import Attempt, Change, RefusedError, cut, flipped, read

_FORMS: dict[str, tuple[str, ...]] = {
    "1": ("PNG", "TIFF", "BMP"), "L": ("PNG", "TIFF", "BMP", "GIF", "JPEG", "WEBP"),
    "LA": ("PNG", "TIFF"), "RGB": ("PNG", "TIFF", "BMP", "JPEG", "WEBP"),
    "RGBA": ("PNG", "TIFF", "WEBP"), "P": ("PNG", "GIF", "TIFF"), "CMYK": ("JPEG", "TIFF"),
    "YCbCr": ("JPEG", "TIFF"), "LAB": ("TIFF",), "I": ("TIFF",), "F": ("TIFF",),
    "I;16": ("PNG", "TIFF"), "I;16B": ("TIFF", "PNG"), "pages": ("GIF", "TIFF", "PNG", "WEBP"),
    "RGB16": ("PNG",), "LA16": ("PNG",), "RGBA16": ("PNG",), "L2": ("PNG",), "L4": ("PNG",),
    "pgm": ("PPM",),
}  # fmt: skip
_LOSSY = 12.0  # of the mean, in a small JPEG or WebP


def images(folder: Path) -> Attempt:
    """Read pictures that PIL or this file has written; some files are damaged."""
    Image.init()  # so that no mutation waits for imports

    def attempt(rng: random.Random) -> Change:
        form = rng.choice(list(_FORMS))
        kind = rng.choice(_FORMS[form])
        content, right, must_refuse = _written(rng, form, kind)
        damage = rng.choice([None, None, None, cut, flipped])
        if damage is not None:
            content, _ = damage(rng, content)
        found: list[NDArray[np.uint8]] = []

        def convert() -> None:  # a size that a flipped bit has made large takes time
            with mock.patch.object(Image, "MAX_IMAGE_PIXELS", 1 << 20):
                image = opened(content, "a picture")
            found.append(pixels(image, 1 if image.mode in GREY else 3, "a picture"))

        if damage is None and right is not None and not must_refuse:
            try:
                read(convert)
            except RefusedError:
                raise AssertionError(f"{kind} of mode {form} was refused") from None
            bound = _LOSSY if kind in ("JPEG", "WEBP") else 1.0
            if abs(found[0].mean() - right) > bound:
                raise AssertionError(f"{kind} {form}: mean {found[0].mean()}, not {right}")
            return Change(form)
        read(convert)
        if must_refuse and damage is None:
            raise AssertionError(f"{kind} of mode {form} was read")
        return Change(form)

    return attempt


def _written(rng: random.Random, form: str, kind: str) -> tuple[bytes, float | None, bool]:
    """A file, its mean from 0 to 255 if it is known, and whether it must be refused."""
    draw = np.random.default_rng(rng.randrange(1 << 32))
    size = (rng.randint(1, 24), rng.randint(1, 24))
    options: dict[str, Any] = {}
    if rng.random() < 0.3 and kind in ("PNG", "JPEG", "WEBP") and form != "pages":
        exif = Image.Exif()
        exif[0x0112] = rng.randint(0, 9)
        options["exif"] = exif
    if form in ("RGB16", "LA16", "RGBA16", "L2", "L4"):
        return _png(draw, form, size)
    if form == "pgm":
        top = rng.choice([255, 1023, 4095, 65535])
        values = draw.integers(0, top + 1, size)
        raw = values.astype(np.uint8 if top < 256 else ">u2").tobytes()
        return b"P5 %d %d %d\n" % (size[1], size[0], top) + raw, values.mean() / top * 255, False
    if form in ("I", "F", "I;16", "I;16B"):
        return _deep(rng, draw, form, kind, size, options)
    channels = {"RGB": 3, "YCbCr": 3, "LAB": 3, "RGBA": 4, "CMYK": 4, "LA": 2}.get(form, 1)
    values = draw.integers(0, 256, (*size, channels)).astype(np.uint8)
    if kind in ("JPEG", "WEBP"):
        values[:] = values[:1, :1]  # one colour, which is not lost
        if form in ("LA", "RGBA"):
            values[..., -1] = 255
    if form == "pages":
        frames = [Image.fromarray(v) for v in draw.integers(0, 256, (3, *size)).astype(np.uint8)]
        return _saved(frames[0], kind, save_all=True, append_images=frames[1:]), None, True
    if form == "1":
        image = Image.fromarray(values[..., 0] > 127)
        return _saved(image, kind, **options), float((values > 127).mean() * 255), False
    if form == "P":
        palette = draw.integers(0, 256, (256, 3)).astype(np.uint8)
        image = Image.fromarray(values[..., 0]).convert("P")
        image.putpalette(palette.tobytes())
        right = palette[values[..., 0]].astype(float)
        if kind == "PNG" and rng.random() < 0.5:
            alpha = draw.integers(0, 256, 256).astype(np.uint8)
            options["transparency"] = alpha.tobytes()
            a = alpha[values[..., 0]][..., None] / 255
            right = right * a + 255 * (1 - a)
        return _saved(image, kind, **options), float(right.mean()), False
    if form == "LAB":
        return _saved(Image.frombytes("LAB", size[::-1], values.tobytes()), kind), None, False
    image = Image.frombytes(form, size[::-1], values.tobytes())
    right = values.astype(float)
    if form in ("LA", "RGBA"):
        a = right[..., -1:] / 255
        right = right[..., :-1] * a + 255 * (1 - a)
    elif form == "CMYK":
        right = (255 - right[..., :3]) * (255 - right[..., 3:]) / 255
    elif form == "YCbCr":
        y, cb, cr = right[..., 0], right[..., 1] - 128, right[..., 2] - 128
        right = np.stack([y + 1.402 * cr, y - 0.344136 * cb - 0.714136 * cr, y + 1.772 * cb])
        right = right.clip(0, 255)
    elif form in ("L", "RGB") and kind == "PNG" and rng.random() < 0.3:
        key = values[0, 0].tolist()
        options["transparency"] = key[0] if form == "L" else tuple(key)
        right = np.where((values == values[0, 0]).all(-1, keepdims=True), 255.0, right)
    return _saved(image, kind, **options), float(right.mean()), False


def _deep(
    rng: random.Random,
    draw: np.random.Generator,
    form: str,
    kind: str,
    size: tuple[int, int],
    options: dict[str, Any],
) -> tuple[bytes, float, bool]:
    low, high = rng.choice([(0, 1), (0, 255), (0, 65535), (-9, 255), (0, 1 << 31)])
    values = low + draw.random(size) * (high - low)
    values[0, 0] = high - 1 if high == 1 << 31 else high
    if form == "F":
        top, data = 1.0, values.astype(np.float32)
    elif form == "I":
        top, data = 255.0, values.astype(np.int32)
    else:
        top, data = 65535.0, values.clip(0, 65535).astype("<u2" if form == "I;16" else ">u2")
    right = float(np.rint(data / top * 255).mean())
    outside = bool(data.min() < 0 or data.max() > top)
    return _saved(Image.fromarray(data), kind, **options), right, outside


def _saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **({"quality": 95} if kind == "JPEG" else {}), **options)
    return file.getvalue()


def _png(
    draw: np.random.Generator, form: str, size: tuple[int, int]
) -> tuple[bytes, float | None, bool]:
    """A PNG file of depths that PIL does not write; at times with a transparent colour."""
    depth = 16 if form.endswith("16") else int(form[-1])
    channels = {"RGB16": 3, "LA16": 2, "RGBA16": 4}.get(form, 1)
    top = (1 << depth) - 1
    values = draw.integers(0, top + 1, (*size, channels))
    if depth == 16:
        rows = [b"\0" + row.astype(">u2").tobytes() for row in values]
    else:
        shifts = np.arange(8 - depth, -1, -depth)
        each = 8 // depth
        padded = np.pad(values[..., 0], ((0, 0), (0, -size[1] % each)))
        packed = (padded.reshape(size[0], -1, each) << shifts).sum(-1).astype(np.uint8)
        rows = [b"\0" + row.tobytes() for row in packed]
    kind = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    head = struct.pack(">IIBBBBB", size[1], size[0], depth, kind, 0, 0, 0)
    key = draw.random() < 0.2 and channels in (1, 3)
    parts = [(b"IHDR", head), (b"IDAT", zlib.compress(b"".join(rows))), (b"IEND", b"")]
    if key:
        parts.insert(1, (b"tRNS", struct.pack(f">{channels}H", *values[0, 0])))
    content = b"\x89PNG\r\n\x1a\n"
    for name, data in parts:
        content += struct.pack(">I", len(data)) + name + data
        content += struct.pack(">I", zlib.crc32(name + data))
    right = values / top * 255
    if channels in (2, 4):
        a = right[..., -1:] / 255
        right = right[..., :-1] * a + 255 * (1 - a)
    return content, float(right.mean()), bool(key)
