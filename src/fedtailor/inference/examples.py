"""Texts, pictures and arrays, as the examples of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..data.images import PICTURES, picture_array
from ..data.pixels import opened, pixels
from ..data.table import Images, Tokens
from ..data.tokens import encode
from ..errors import InputError, missing_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def text_examples(
    values: Any, tokenizer: PreTrainedTokenizerBase | None, max_length: int, *, prompts: bool
) -> Tokens:
    """Texts as token sequences of at most ``max_length``; `Tokens` as they are. A language model
    goes on from ``prompts``. Raises InputError where these are no texts, or there is no tokenizer
    for them."""
    if isinstance(values, Tokens):
        return values
    texts = [values] if isinstance(values, str) else list(values)
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise InputError(
                f"input {number} is a {type(text).__name__}; this model reads texts (str)"
            )
    if tokenizer is None:
        raise InputError(
            "this model has no tokenizer; give its inputs as fedtailor.data.table.Tokens"
        )
    return encode(texts, tokenizer, max_length, prompts=prompts)


def picture_examples(values: Any, shape: Sequence[int]) -> Images:
    """Pictures of the run's ``shape`` (channels, height, width).

    Args:
        values: an array ``[n, C, H, W]`` or, of grey pictures, ``[n, H, W]``: whole numbers,
            or floats as the model reads them; or a list of paths, of PIL's pictures, or of arrays
            without n. `Images` as they are.
        shape: to which pictures of another size are resized.

    Raises:
        InputError: a file is no picture, or an array has other channels.
    """
    if isinstance(values, Images):
        return values
    if isinstance(values, str | Path):
        values = picture_paths(Path(values)) if Path(values).is_dir() else [values]
    pictures = [_picture(value, shape) for value in values]
    empty = np.zeros((0, *shape), np.uint8)
    return Images(np.stack(pictures) if pictures else empty)


def picture_paths(folder: Path) -> list[Path]:
    """The pictures in a folder and below it, in the order of their names. Raises InputError where
    there is none."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in PICTURES)
    if not paths:
        raise InputError(f"{folder} holds no pictures; allowed: {', '.join(PICTURES)}")
    return paths


def _picture(value: Any, shape: Sequence[int]) -> NDArray[Any]:
    channels, height, width = shape
    name: object = "a picture"
    if isinstance(value, str | Path):
        name, value = value, _opened(Path(value))
    if not isinstance(value, np.ndarray):
        if not hasattr(value, "convert"):
            raise InputError(
                f"an input is a {type(value).__name__}; this model reads pictures: paths, arrays "
                "or PIL's images"
            )
        value = pixels(value, channels, name)
    array = value[None] if value.ndim == 2 else value
    if array.ndim != 3 or len(array) != channels:
        raise InputError(
            f"a picture has the shape {list(value.shape)}; allowed: {channels} channels, height, "
            f"width, as {list(shape)} in training"
        )
    array = picture_array(array, "the inputs")
    if array.shape[1:] != (height, width):
        array = Images(array[None]).resized(height, width).values[0]
    fitting: NDArray[Any] = array
    return fitting


def _opened(path: Path) -> Any:
    try:
        return opened(path, path)
    except FileNotFoundError:
        raise missing_file(path) from None
