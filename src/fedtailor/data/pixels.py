"""A picture's pixels as bytes, by one rule for each mode; an export takes this file along."""

from __future__ import annotations

import struct
import warnings
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError

GREY = ("1", "L", "LA", "I", "F", "I;16", "I;16L", "I;16B", "I;16N")

_FORMATS = ("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
_WITH_PAGES = ("GIF", "PNG", "TIFF", "WEBP")  # a JPEG's further pictures show the same scene
_BROKEN = (  # what PIL raises at files that are none, or are damaged
    OSError, SyntaxError, ValueError, EOFError, LookupError, TypeError, ArithmeticError,
    RuntimeError, MemoryError, struct.error, zlib.error,
)  # fmt: skip


def opened(source: Path | bytes, name: object) -> Any:
    """Open a file with a picture, or its bytes, which messages call ``name``. Returns PIL's image,
    upright and loaded. Raises InputError where it is no picture, or damaged, too large, or one of
    several in the file."""
    from PIL import Image, ImageOps

    bombs = (Image.DecompressionBombError, Image.DecompressionBombWarning)
    file = BytesIO(source) if isinstance(source, bytes) else source
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(file, formats=_FORMATS) as image:
                problem = _problem(image)
                if problem is None:
                    image.load()
                    ImageOps.exif_transpose(image, in_place=True)  # a copy would have no format
                    return image
    except FileNotFoundError:
        raise
    except (*_BROKEN, *bombs) as error:
        words = " ".join(str(error).split()) or type(error).__name__
        problem = "it is empty" if source == b"" else words[:200]
        if "cannot identify" in words:
            problem = f"it is none of {', '.join(_FORMATS)}"
    raise InputError(f"{name} is no picture that can be read: {problem}")


def _problem(image: Any) -> str | None:
    """Why an image can't be converted as it stands; None if it can."""
    if 0 in image.size:
        return f"it has {image.width} x {image.height} pixels"
    if image.format in _WITH_PAGES and getattr(image, "is_animated", False):
        return "it holds several pictures (frames or pages); save each in a file of its own"
    raw = str(image.tile[0][3]) if image.tile else ""
    if "transparency" in image.info and image.mode != "P" and ";" in raw:
        return "it has a transparent colour in other than 8 bits; save it with an alpha channel"
    if image.mode in ("F", "I", "I;16", "I;16B") and _tag(image, 262) == 0:
        return "it has more than 8 bits, of which 0 is white; save it with 0 as black"
    if image.mode == "L" and 2 in (_tag(image, 339) or ()):  # PIL reads -1 as 255
        return "its bytes have a sign; save it with values from 0 to 255"
    return None


def _tag(image: Any, number: int) -> Any:
    """The value of a TIFF file's tag; None if it has none."""
    return image.tag_v2.get(number) if image.format == "TIFF" else None


def pixels(image: Any, channels: int, name: object) -> NDArray[np.uint8]:
    """Return the pixels of PIL's image, uint8 ``[C, H, W]``.

    A picture of 8 bits or fewer keeps its range. One of 16 bits is scaled from 0 to 65,535, one of
    floats from 0 to 1. Whole numbers of 32 bits or with a sign are from 0 to 255. What is
    transparent is white. Raises InputError where a value is out of that range, or the mode can't be
    converted."""
    from PIL import Image

    mode = "L" if channels == 1 else "RGB"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if image.mode in ("I", "F") or image.mode.startswith("I;16"):
                bits = _tag(image, 258) if image.mode.startswith("I;16") else None
                top = (1 << bits[0]) - 1 if bits else 65535
                image = Image.fromarray(_bytes(image, top, name))
            elif image.has_transparency_data:
                white = Image.new("RGBA", image.size, "white")
                image = Image.alpha_composite(white, image.convert("RGBA"))
            values = np.array(image.convert(mode))
    except InputError:
        raise
    except _BROKEN as error:
        raise InputError(f"{name} has colours that can't be converted: {error}") from None
    return values.reshape(*values.shape[:2], -1).transpose(2, 0, 1)


def _bytes(image: Any, top: int, name: object) -> NDArray[np.uint8]:
    """A grey picture of more than 8 bits, ``[H, W]``; ``top`` is white in one of 16 bits."""
    values = np.asarray(image)
    if image.mode == "I" and image.format != "PPM":  # of PPM files, PIL makes values to 65,535
        top, kind = 255, "signed or 32-bit whole numbers"
    elif image.mode == "F":
        top, kind = 1, "floats"
    else:
        kind = "16 bits"
    low, high = values.min(), values.max()
    if not (low >= 0 and high <= top):
        raise InputError(
            f"{name} is a picture of {kind} with values from {low:g} to {high:g}; allowed: 0 to "
            f"{top}. Save it with 8 or 16 bits"
        )
    return np.rint(values.astype(np.float64) * (255 / top)).astype(np.uint8)
