"""Kinds of task whose targets are tokens of a vocabulary."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from .objective import IGNORED, Objective, Scores

if TYPE_CHECKING:
    from torch import Tensor


class VocabularyObjective(Objective):
    """The logits ``[b, L, vocabulary]`` are scored by token, whole or in pieces (`task.pieces`)."""

    @abstractmethod
    def token_targets(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the token that each position predicts, int64 ``[b, L]``; `IGNORED`: none."""

    def counts(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return how many tokens of each example are targets."""
        return (self.token_targets(batch) != IGNORED).sum(1).float()

    def score(self, logits: Tensor, batch: Mapping[str, Tensor]) -> Scores:
        """Compute the cross-entropy (natural logarithm) of the target tokens, and which of them are
        the most probable ones."""
        from torch.nn import functional as F

        targets = self.token_targets(batch)
        loss = F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="none", ignore_index=IGNORED
        )
        return token_scores(loss.view(targets.shape), logits.argmax(-1) == targets, targets)


def token_scores(loss: Tensor, hits: Tensor, targets: Tensor) -> Scores:
    """Sum what is known of each position, ``[b, L]``, to the scores of examples."""
    return Scores(loss.sum(1), (hits * ~loss.isnan()).sum(1), (targets != IGNORED).sum(1).to(loss))
