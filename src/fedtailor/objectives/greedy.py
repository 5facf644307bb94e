"""Texts that a model writes: the most probable token, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence


def greedy(
    following: Callable[[list[list[int]]], Sequence[int]],
    most: Sequence[int],
    ends: Collection[int],
) -> list[list[int]]:
    """The tokens that a model writes for each row of a batch.

    Args:
        following: from the tokens so far to the next of each row; rows that have ended are as they
            were, and what follows them is not looked at.
        most: how many tokens of each row at most.
        ends: the tokens after which a text ends; they are left out.
    """
    texts: list[list[int]] = [[] for _ in most]
    is_open = [count > 0 for count in most]
    while any(is_open):
        for row, token in enumerate(following(texts)):
            if is_open[row] and token not in ends:
                texts[row].append(token)
                is_open[row] = len(texts[row]) < most[row]
            else:
                is_open[row] = False
    return texts
