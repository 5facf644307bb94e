"""Texts as token ids: computed once, stored in the cache, opened as memory maps."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .. import disk_cache
from ..errors import InputError
from .table import Indices, Tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHUNK = 1000  # texts that are tokenised together
_FORMAT = 3  # version of the cached files; part of their key


def tokenise(
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    *,
    ends: bool = False,
) -> tuple[Tokens, Indices]:
    """Turn texts into token ids, with the tokenizer's special tokens.

    With ``ends``, as a language model learns them, each text has the tokenizer's end-of-text token
    as its last one, once. A text that is truncated has none: it did not end there. Texts without a
    token to predict, and those of blanks alone, are left out.

    Args:
        texts: N texts; an empty one consists of its special tokens.
        tokenizer: a Hugging Face fast tokenizer.
        max_length: tokens, more than 1; longer sequences are truncated.
        ends: whether the texts are for language modelling. If not, a text without any token gets
            the tokenizer's first special token instead.

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
    folder = disk_cache.cache_dir() / "tokens" / _key(texts, tokenizer, max_length, ends)
    if not folder.is_dir():
        sequences = (_to_learn if ends else _sequences)(texts, tokenizer, max_length)
        disk_cache.save(folder, _arrays(sequences, tokenizer))
    values, offsets, rows, cut = (
        np.load(folder / f"{name}.npy", mmap_mode="r")
        for name in ("values", "offsets", "rows", "cut")
    )
    return Tokens(values, offsets, cut), rows


def encode(
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    *,
    prompts: bool = False,
) -> Tokens:
    """Turn texts into token ids as `tokenise` does, each of them, and without a cache.

    With ``prompts`` a language model goes on from each: none has the end-of-text token that some
    tokenizers add.
    """
    sequences = _sequences(texts, tokenizer, max_length, prompts)
    arrays = _arrays(sequences, tokenizer)
    return Tokens(arrays["values"], arrays["offsets"], arrays["cut"])


def _key(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_length: int, ends: bool
) -> str:
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content["truncation"] = content["padding"] = None  # those of the tokenizer's last call
    end = tokenizer.eos_token_id if ends else None
    parts = [_FORMAT, max_length, ends, end, _filler(tokenizer), content]
    head = json.dumps(parts, sort_keys=True).encode()
    return disk_cache.hash_of(head, (text.encode("utf-8", "surrogatepass") for text in texts))


def _arrays(
    sequences: Iterable[tuple[list[int], bool]], tokenizer: PreTrainedTokenizerBase
) -> dict[str, NDArray[Any]]:
    """The arrays of `Tokens`, and the numbers of the ``sequences`` that are there: an empty one is
    not."""
    dtype = np.uint16 if num_ids(tokenizer) <= 2**16 else np.uint32
    parts: list[NDArray[Any]] = [np.zeros(0, dtype)]
    lengths = [0]
    rows: list[int] = []
    cut: list[int] = []
    for row, (ids, is_cut) in enumerate(sequences):
        if ids:
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
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    prompts: bool = False,
) -> Iterator[tuple[list[int], bool]]:
    """Yield the ids of each text, one or more, and whether it was truncated."""
    for encoding in _encodings(texts, tokenizer, None if prompts else max_length):
        ids, is_cut = encoding.ids, bool(encoding.overflowing)
        if prompts:
            if ids and ids[-1] == tokenizer.eos_token_id and encoding.special_tokens_mask[-1]:
                del ids[-1]
            ids, is_cut = ids[:max_length], len(ids) > max_length
        yield ids or [_filler(tokenizer)], is_cut


def _to_learn(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> Iterator[tuple[list[int], bool]]:
    """Yield the ids of each text with its end, and whether it was truncated; no ids of a text
    without anything to learn."""
    end, added = tokenizer.eos_token_id, tokenizer.num_special_tokens_to_add()
    for text, encoding in zip(texts, _encodings(texts, tokenizer, None), strict=True):
        ids = encoding.ids
        is_blank = not text.strip() or len(ids) <= added
        while end is not None and ids[-1:] == [end]:
            del ids[-1]
        ids += [] if end is None else [end]
        yield [] if is_blank or len(ids) < 2 else ids[:max_length], len(ids) > max_length


def _encodings(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, max_length: int | None
) -> Iterator[Any]:
    """Yield the encoding of each text; None: of whole texts."""
    for start in range(0, len(texts), _CHUNK):
        yield from tokenizer(
            list(texts[start : start + _CHUNK]),
            truncation=max_length is not None,
            max_length=max_length,
            verbose=False,
        ).encodings


def num_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """How many rows a table needs that is looked up by the tokenizer's ids."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def _filler(tokenizer: PreTrainedTokenizerBase) -> int:
    special: list[int] = tokenizer.all_special_ids
    return special[0] if special else 0
