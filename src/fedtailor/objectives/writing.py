"""Kinds of task whose models write texts: the targets are tokens of a vocabulary."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .objective import IGNORED, OWN_METRIC, MetricFunction, Objective, Scores, Tensor
from .text_metrics import WRITTEN, check_packages

Ids = Sequence[int]


@dataclass(frozen=True)
class Written:
    """The ``answer`` of a model to a ``prompt``; the right one is ``reference``."""

    prompt: str
    answer: str
    reference: str


class Writing(Objective):
    """A model goes on from a prompt; `exercise` makes one of an example. The logits ``[b, L,
    vocabulary]`` are scored by token, whole or in pieces (`task.pieces`)."""

    per_token = True
    counted = "tokens"
    target = "tokens"
    answer_columns = frozenset({"text"})
    metrics: ClassVar[Mapping[str, MetricFunction]] = WRITTEN
    shares = frozenset(WRITTEN) | {OWN_METRIC}

    @abstractmethod
    def token_targets(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the token that each position predicts, int64 ``[b, L]``; `IGNORED`: none."""

    @abstractmethod
    def exercise(self, ids: Ids, targets: Ids | None) -> tuple[Ids, Ids]:
        """Return the tokens of a prompt, and those of the right answer, from an example's ``ids``
        and its ``targets``, where the inputs are not the targets."""

    def counts(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return how many tokens of each example are targets."""
        return (self.token_targets(batch) != IGNORED).sum(1).float()

    def score(self, logits: Tensor, batch: Mapping[str, Tensor]) -> Scores:
        """Compute the cross-entropy (natural logarithm) and the top-1 hits of the target tokens."""
        targets = self.token_targets(batch)
        return self.token_scores(*token_losses(logits, targets), targets, batch)

    def token_scores(
        self, loss: Tensor, hits: Tensor, targets: Tensor, batch: Mapping[str, Tensor]
    ) -> Scores:
        """Make the scores of examples of what is known of each position, ``[b, L]``: here sums."""
        counts = (targets != IGNORED).sum(1).to(loss)
        return Scores(loss.sum(1), (hits * ~loss.isnan()).sum(1), counts)

    def check_metrics(self, names: Collection[str]) -> None:
        check_packages(names)

    def columns(self, answer: str) -> dict[str, Any]:
        return {"text": answer}


def following(tokens: Tensor) -> Tensor:
    """Return the token after each of ``tokens`` ``[..., L]``; `IGNORED` at the end."""
    from torch.nn import functional as F

    return F.pad(tokens[..., 1:], (0, 1), value=IGNORED)


def token_losses(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return each position's cross-entropy (natural logarithm), 0 where nothing is predicted, and
    whether the target is the most probable token; both of the targets' shape."""
    from torch.nn import functional as F

    loss = F.cross_entropy(
        logits.flatten(0, -2), targets.flatten(), reduction="none", ignore_index=IGNORED
    )
    return loss.view(targets.shape), logits.argmax(-1) == targets
