"""Texts, pictures and arrays, as the examples of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data.images import PICTURES, picture_array
from ..data.pixels import opened, pixels
from ..data.table import Images, Tokens
from ..data.tokens import encode
from ..errors import InputError, brief, missing_file
from ..objectives.encoding import Tokenizer
from ..objectives.objective import Objective


def text_examples(
    values: Any,
    tokenizer: Tokenizer | None,
    max_length: int,
    objective: Objective,
    *,
    are_pairs: bool,
) -> Tokens:
    """Texts, pairs of texts or lists of words as token sequences of at most ``max_length``;
    `Tokens` as they are."""
    if isinstance(values, Tokens):
        return values
    values = inputs_of(values)
    if objective.joins_columns:
        values = objective.conversations([values])
    texts = [one_input(value, objective, are_pairs=are_pairs) for value in values]
    if tokenizer is None:
        raise InputError("this model has no tokenizer; give inputs as fedtailor.data.table.Tokens")
    return encode(texts, tokenizer, max_length, objective)


def inputs_of(values: Any) -> list[Any]:
    """Several inputs, as a list; one text is an input by itself."""
    if isinstance(values, str | Path):
        return [values]
    is_list = hasattr(values, "__iter__") and getattr(values, "shape", None) != ()
    if isinstance(values, Mapping) or hasattr(values, "columns") or not is_list:
        raise InputError(f"inputs = {brief(values, 60)}: must be a list, such as a table's column")
    return list(values)


def one_input(value: Any, objective: Objective, *, are_pairs: bool) -> Any:
    """A text, a pair of texts as a tuple, or a list of words. Raises InputError for others."""
    needs = "lists of words, or texts (str)" if objective.reads_words else "texts (str)"
    if are_pairs:
        needs = "pairs of texts (two str)"
    if isinstance(value, str) or not (objective.reads_words or are_pairs):
        fits = isinstance(value, str) and not are_pairs
    else:
        parts = value if isinstance(value, list | tuple) else [None]
        fits = all(isinstance(part, str) for part in parts) and (len(parts) == 2 or not are_pairs)
        value = tuple(parts) if are_pairs else list(parts)
    if not fits:
        raise InputError(f"an input is a {type(value).__name__}; this model reads {needs}")
    return value


def picture_examples(values: Any, shape: Sequence[int]) -> Images:
    """Pictures of the run's ``shape`` (channels, height, width), to which others are resized:
    arrays ``[n, C, H, W]`` or, of grey ones, ``[n, H, W]``, whole numbers, or floats as the model
    reads them; or a list of paths, of PIL's pictures, or of arrays without n."""
    if isinstance(values, Images):
        return values
    if isinstance(values, str | Path):
        values = picture_paths(Path(values)) if Path(values).is_dir() else [values]
    pictures = [_picture(value, shape) for value in values]
    empty = np.zeros((0, *shape), np.uint8)
    return Images(np.stack(pictures) if pictures else empty)


def picture_paths(folder: Path) -> list[Path]:
    """The pictures in a folder and below it, in the order of their names."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in PICTURES)
    if not paths:
        raise InputError(f"{folder} holds no pictures; allowed: {', '.join(PICTURES)}")
    return paths


def _picture(value: Any, shape: Sequence[int]) -> NDArray[Any]:
    channels, height, width = shape
    name: object = "a picture"
    if isinstance(value, str | Path):
        name, path = value, Path(value)
        try:
            value = opened(path, path)
        except FileNotFoundError:
            raise missing_file(path) from None
    if not isinstance(value, np.ndarray):
        if not hasattr(value, "convert"):
            reads = "pictures: paths, arrays or PIL's images"
            raise InputError(f"an input is a {type(value).__name__}; this model reads {reads}")
        value = pixels(value, channels, name)
    array = value[None] if value.ndim == 2 else value
    if array.ndim != 3 or len(array) != channels:
        told = f"allowed: {channels} channels, height, width, as {list(shape)} in training"
        raise InputError(f"a picture has the shape {list(value.shape)}; {told}")
    array = picture_array(array, "the inputs")
    if array.shape[1:] != (height, width):
        array = Images(array[None]).resized(height, width).values[0]
    fitting: NDArray[Any] = array
    return fitting
