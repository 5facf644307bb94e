"""Texts as tokens: what the kinds of task share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Values = Sequence[Any]  # one a row
Tokenizer: TypeAlias = "PreTrainedTokenizerBase"
_CHUNK = 1000  # texts that are tokenised together


@dataclass(frozen=True)
class Example:
    """A row of texts as numbers.

    ``ids`` are its tokens; without any it is left out. ``is_cut`` says whether it was truncated.
    ``types`` say which of a pair's texts each token is of, where the model is told. ``labels`` are
    its targets, where these go by tokens. ``sizes`` are the lengths of several sequences that
    ``ids`` are, one after the other; None: it is one.
    """

    ids: list[int]
    is_cut: bool = False
    types: list[int] | None = None
    labels: list[int] | None = None
    sizes: list[int] | None = None


def whole_texts(values: Values, tokenizer: Tokenizer, max_length: int) -> Iterator[Example]:
    """Yield the tokens of each text, or pair of texts, truncated, with the tokenizer's special
    tokens; a text without any token gets the first special one."""
    has_types = "token_type_ids" in tokenizer.model_input_names
    for value, one in zip(values, encodings(values, tokenizer, max_length), strict=True):
        ids = one.ids or [filler(tokenizer)]
        types = one.type_ids if has_types and isinstance(value, tuple) else None
        yield Example(ids, bool(one.overflowing), types)


def encodings(
    values: Values, tokenizer: Tokenizer, max_length: int | None, **options: Any
) -> Iterator[Any]:
    """Yield the ``tokenizers.Encoding`` of each text, pair of texts (a tuple) or list of words;
    None: of whole texts. ``options`` are those of the tokenizer's call."""
    for start in range(0, len(values), _CHUNK):
        some = list(values[start : start + _CHUNK])
        texts = list(zip(*some, strict=True)) if isinstance(some[0], tuple) else [some]
        yield from tokenizer(
            *map(list, texts),
            truncation=max_length is not None,
            max_length=max_length,
            is_split_into_words=isinstance(some[0], list),
            verbose=False,
            **options,
        ).encodings


def with_end(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """A text's tokens with the tokenizer's end-of-text token, once; as they are without one."""
    end = tokenizer.eos_token_id
    while end is not None and ids[-1:] == [end]:
        del ids[-1]
    return ids if end is None else [*ids, end]


def filler(tokenizer: Tokenizer) -> int:
    """The token of a text that has none."""
    special: list[int] = tokenizer.all_special_ids
    return special[0] if special else 0
