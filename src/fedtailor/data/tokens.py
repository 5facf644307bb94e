"""Texts as token ids: computed once, stored in the cache, opened as memory maps."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .. import disk_cache
from ..errors import InputError
from .table import Indices, Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHUNK = 1000  # texts that are tokenised together
_FORMAT = 2  # version of the cached files; part of their key


def tokenise(
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    cache: Path,
    *,
    min_tokens: int = 1,
) -> tuple[Tokens, Indices]:
    """Turn texts into token ids, with the tokenizer's special tokens.

    Args:
        texts: N texts; an empty one consists of its special tokens.
        tokenizer: a Hugging Face fast tokenizer.
        max_length: tokens, more than 1; longer sequences are truncated.
        cache: the folder below which ``tokens/HASH/`` has the result; the hash is over the
            texts, the tokenizer's content and the lengths.
        min_tokens: texts with fewer tokens are left out; with 1, a text without any token gets the
            tokenizer's first special token instead.

    Returns:
        The sequences, with those that were truncated, and the numbers of their texts: int64
        ``[len(tokens)]``, ascending.

    Raises:
        InputError: the tokenizer isn't a fast one.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise InputError(
            f"the tokenizer {type(tokenizer).__name__} is not fast; a fast tokenizer is needed"
        )
    folder = cache / "tokens" / _key(texts, tokenizer, max_length, min_tokens)
    if not folder.is_dir():
        disk_cache.save(folder, _encode(texts, tokenizer, max_length, min_tokens))
    values, offsets, rows, cut = (
        np.load(folder / f"{name}.npy", mmap_mode="r")
        for name in ("values", "offsets", "rows", "cut")
    )
    return Tokens(values, offsets, cut), rows


def encode(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_length: int) -> Tokens:
    """Turn texts into token ids as `tokenise` does, each of them, and without a cache."""
    arrays = _encode(texts, tokenizer, max_length, 1)
    return Tokens(arrays["values"], arrays["offsets"])


def _key(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_length: int, min_tokens: int
) -> str:
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content["truncation"] = content["padding"] = None  # those of the tokenizer's last call
    parts = [_FORMAT, max_length, min_tokens, _filler(tokenizer), content]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode())
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:32]


def _encode(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_length: int, min_tokens: int
) -> dict[str, NDArray[Any]]:
    dtype = np.uint16 if len(tokenizer) <= 2**16 else np.uint32
    parts: list[NDArray[Any]] = [np.zeros(0, dtype)]
    lengths = [0]
    rows: list[int] = []
    cut: list[int] = []
    for row, (ids, is_cut) in enumerate(_sequences(texts, tokenizer, max_length)):
        ids = ids or [_filler(tokenizer)]
        if len(ids) >= min_tokens:
            if is_cut:
                cut.append(len(rows))
            parts.append(np.array(ids, dtype))
            lengths.append(len(ids))
            rows.append(row)
    return {
        "values": np.concatenate(parts),
        "offsets": np.cumsum(lengths, dtype=np.int64),
        "rows": np.array(rows, np.int64),
        "cut": np.array(cut, np.int64),
    }


def _sequences(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> Iterator[tuple[list[int], bool]]:
    """Yield the ids of each text, and whether it was truncated."""
    for start in range(0, len(texts), _CHUNK):
        encoded = tokenizer(
            list(texts[start : start + _CHUNK]),
            truncation=True,
            max_length=max_length,
            return_attention_mask=False,
            return_token_type_ids=False,
        )
        for ids, encoding in zip(encoded["input_ids"], encoded.encodings, strict=True):
            yield ids, bool(encoding.overflowing)


def _filler(tokenizer: PreTrainedTokenizerBase) -> int:
    special: list[int] = tokenizer.all_special_ids
    return special[0] if special else 0
