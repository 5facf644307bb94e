"""Text from a causal language model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
from torch import Tensor

from ..data.table import Tokens
from ..objectives.greedy import greedy
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

    def following(new: list[list[int]]) -> list[int]:
        texts = [[*prompt, *tokens] for prompt, tokens in zip(prompts, new, strict=True)]
        offsets = np.cumsum([0, *map(len, texts)])
        tokens = Tokens(np.concatenate([np.array(text, np.int64) for text in texts]), offsets)
        scores = logits(tokens.batch(np.arange(len(texts))))
        return [int(scores[row, len(text) - 1].argmax()) for row, text in enumerate(texts)]

    room = [max_new_tokens if longest is None else longest - len(prompt) for prompt in prompts]
    return greedy(following, [min(max_new_tokens, count) for count in room], ends)
