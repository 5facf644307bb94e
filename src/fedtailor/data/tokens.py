"""Texts as token ids: computed once, stored in the cache, opened as memory maps."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import disk_cache
from ..errors import InputError
from ..objectives import DEFAULT
from ..objectives.encoding import Example, Tokenizer, Values, filler
from ..objectives.objective import Objective
from .table import Indices, Ragged, Tokens

_FORMAT = 4  # version of the cached files; part of their key
_OFFSETS = {
    "values": "offsets",
    "types": "type_offsets",
    "labels": "label_offsets",
    "sizes": "size_offsets",
}


@dataclass(frozen=True)
class Encoded:
    """Texts as tokens, the numbers of the texts that are there, ascending, and their targets where
    these go by tokens."""

    inputs: Tokens
    rows: Indices
    labels: Ragged | None = None


def tokenise(
    values: Values,
    tokenizer: Tokenizer,
    max_length: int,
    objective: Objective = DEFAULT,
    targets: Values | None = None,
) -> Encoded:
    """Turn N texts, pairs of texts (tuples) or lists of words into ids of at most ``max_length``
    tokens, as the kind of task does; ``targets`` are those of each, where they go by tokens. Raises
    InputError where the tokenizer isn't a fast one."""
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            f"the tokenizer {type(tokenizer).__name__} is not fast; a fast tokenizer is needed"
        )
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content["truncation"] = content["padding"] = None  # those of the tokenizer's last call
    special = [tokenizer.eos_token_id, filler(tokenizer), tokenizer.model_input_names]
    special.append(getattr(tokenizer, "chat_template", None))
    parts = [_FORMAT, max_length, objective.name, targets is None, special, content]
    head = json.dumps(parts, sort_keys=True).encode()
    key = disk_cache.hash_of(head, map(bytes_of, [*values, *(() if targets is None else targets)]))
    folder = disk_cache.cache_dir() / "tokens" / key
    if not folder.is_dir():
        examples = objective.encode(values, targets, tokenizer, max_length)
        disk_cache.save(folder, _arrays(examples, tokenizer))
    return _encoded({path.stem: np.load(path, mmap_mode="r") for path in folder.glob("*.npy")})


def encode(
    values: Values, tokenizer: Tokenizer, max_length: int, objective: Objective = DEFAULT
) -> Tokens:
    """Turn each of some texts into the token ids that the model predicts from, without a cache."""
    examples = objective.encode_prompts(values, tokenizer, max_length)
    return _encoded(_arrays(examples, tokenizer)).inputs


def bytes_of(value: Any) -> bytes:
    """The bytes of a text, or of a list or an object of texts."""
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    return b"\0" + json.dumps(value).encode()


def _arrays(examples: Iterable[Example], tokenizer: Tokenizer) -> dict[str, NDArray[Any]]:
    """The arrays of `Encoded`, by name."""
    dtype = np.uint16 if num_ids(tokenizer) <= 2**16 else np.uint32
    dtypes = {"values": dtype, "types": np.uint8, "labels": np.int32, "sizes": np.int32}
    parts: dict[str, list[NDArray[Any]]] = {name: [np.zeros(0, dtypes[name])] for name in dtypes}
    needed = {"values"}  # those that are more than defaults
    rows: list[int] = []
    cut: list[int] = []
    for row, example in enumerate(examples):
        if not example.ids:
            continue
        if example.is_cut:
            cut.append(len(rows))
        rows.append(row)
        length = len(example.ids)
        several = example.sizes if len(example.sizes or ()) > 1 else None
        for name, numbers, default in (
            ("values", example.ids, []),
            ("types", example.types, [0] * length),
            ("labels", example.labels, []),
            ("sizes", several, [length]),
        ):
            if numbers is not None:
                needed.add(name)
            parts[name].append(np.array(default if numbers is None else numbers, dtypes[name]))
    arrays = {"rows": np.array(rows, np.int64), "cut": np.array(cut, np.int64)}
    for name in needed:
        arrays[name] = np.concatenate(parts[name])
        ends = np.cumsum([len(part) for part in parts[name]], dtype=np.int64)
        arrays[_OFFSETS[name]] = ends  # where each list begins and ends
    return arrays


def _encoded(arrays: Mapping[str, NDArray[Any]]) -> Encoded:
    labels, sizes = (
        Ragged(arrays[f"{name}s"], arrays[f"{name}_offsets"]) if f"{name}s" in arrays else None
        for name in ("label", "size")
    )
    tokens = Tokens(arrays["values"], arrays["offsets"], arrays["cut"], arrays.get("types"), sizes)
    return Encoded(tokens, arrays["rows"], labels)


def num_ids(tokenizer: Tokenizer) -> int:
    """How many rows a table needs that is looked up by the tokenizer's ids."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1
