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
        targets = self.token_targets(batch)
        return self.token_scores(*token_losses(logits, targets), targets, batch)

    def token_scores(
        self, loss: Tensor, hits: Tensor, targets: Tensor, batch: Mapping[str, Tensor]
    ) -> Scores:
        """Make the scores of examples of what is known of each position, ``[b, L]``: here sums."""
        counts = (targets != IGNORED).sum(1).to(loss)
        return Scores(loss.sum(1), (hits * ~loss.isnan()).sum(1), counts)


def token_losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return each position's cross-entropy, 0 where nothing is predicted, and whether the target is
    the most probable token; both of the targets' shape."""
    from torch.nn import functional as F

    loss = F.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), reduction="none", ignore_index=IGNORED
    )
    return loss.view(targets.shape), logits.argmax(-1) == targets
