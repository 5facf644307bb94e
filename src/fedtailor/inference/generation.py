"""Text from a causal language model: the most probable token, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
from torch import Tensor

from ..data.table import Tokens
from ..params import Batch


def generate(
    logits: Callable[[Batch], Tensor],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    ends: Collection[int],
    longest: int | None,
) -> list[list[int]]:
    """The tokens that follow each of a batch's ``prompts``.

    Args:
        logits: from a batch to ``[b, L, vocabulary]``.
        prompts: token ids, one or more each.
        max_new_tokens: how many at most.
        ends: the tokens after which a text ends; they are left out.
        longest: how many tokens a prompt and its text have at most; None: any number.
    """
    texts = [list(prompt) for prompt in prompts]

    def may_grow(row: int) -> bool:
        length = len(texts[row])
        new = length - len(prompts[row])
        return new < max_new_tokens and (longest is None or length < longest)

    open_ = [may_grow(row) for row in range(len(texts))]
    while any(open_):
        offsets = np.cumsum([0, *map(len, texts)])
        tokens = Tokens(np.concatenate([np.array(text, np.int64) for text in texts]), offsets)
        scores = logits(tokens.batch(np.arange(len(texts))))
        for row, text in enumerate(texts):
            if not open_[row]:
                continue
            token = int(scores[row, len(text) - 1].argmax())
            if token in ends:
                open_[row] = False
                continue
            text.append(token)
            open_[row] = may_grow(row)
    return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
