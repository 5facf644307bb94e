"""Robust aggregation under any method: which of a cohort's uploads the server uses.

Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent. P. Blanchard, E. M. El
Mhamdi, R. Guerraoui, J. Stainer. NeurIPS 2017.

c uploads V_i, of which f may be false; i -> j for the c - f - 2 uploads V_j nearest to V_i:
    s(i) = sum_{i -> j} ||V_i - V_j||^2
    Krum: the upload of the smallest score alone; Multi-Krum: the m uploads of the smallest scores

Differs from the paper:
- The method aggregates the selected uploads, with its own weights; the paper takes the plain mean.
- Running statistics of batch normalisations follow their upload, but are not scored. Each is cut
  to the range that is left without the f smallest and the f largest values of the cohort.
- Where members of the cohort are missing, f becomes as small as the others need.
- In a cohort of three or fewer, where c - f - 2 < 1, the score is the distance of the nearest
  upload.
- m is c - f - 2 unless ``keep`` says otherwise; the paper leaves it open.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt
from torch import Tensor

from ..errors import InputError
from ..params import Params
from ..stacked import squared_distances


@dataclass(frozen=True)
class Robust:
    """A rule, the number of a cohort's uploads that may be false (f), and the number of uploads
    that multi-krum selects (m)."""

    rule: Literal["none", "krum", "multi-krum"] = "none"
    attackers: Annotated[int, Ge(0)] = 0
    keep: Annotated[int, Gt(0)] | None = None  # None: c - f - 2, at least 1

    def check(self, cohort_size: int) -> None:
        """Raise InputError if the cohort is too small for ``attackers`` or ``keep``, or if the rule
        doesn't use them."""
        if self.keep is not None and self.rule != "multi-krum":
            raise InputError(
                f"robust.keep = {self.keep} is for rule 'multi-krum'; the rule is {self.rule!r}"
            )
        if self.rule == "none":
            if self.attackers:
                raise InputError(
                    f"robust.attackers = {self.attackers} without a rule; robust.rule may be "
                    f"'krum' or 'multi-krum'"
                )
            return
        most = max(0, (cohort_size - 3) // 2)
        if self.attackers > most:
            raise InputError(
                f"robust.attackers = {self.attackers} needs a cohort of more than "
                f"{2 * self.attackers + 2} clients; it has {cohort_size}; allowed: 0 to {most}"
            )
        if self.keep is not None and self.keep > cohort_size - self.attackers:
            raise InputError(
                f"robust.keep = {self.keep} is more than the {cohort_size - self.attackers} "
                f"clients that are no attackers; allowed: 1 to {cohort_size - self.attackers}"
            )

    def among(self, present: int) -> Robust:
        """The rule for a round in which so many of the cohort's uploads are there: it withstands as
        many attackers as they allow. Each member that is missing may have been one of them.

        Raises:
            InputError: fewer than three are there, which can't show who is false.

        >>> Robust("krum", attackers=2).among(6).attackers
        1
        """
        if self.attackers and present < 3:
            raise InputError(
                f"{present} uploads are there; with robust.attackers = {self.attackers} at least 3 "
                "are needed"
            )
        attackers = min(self.attackers, max(0, (present - 3) // 2))
        keep = None if self.keep is None else min(self.keep, present - attackers)
        return replace(self, attackers=attackers, keep=keep)

    def bound(self, statistics: Tensor) -> Tensor:
        """``statistics`` ``[c, ...]``, which are not scored, cut to a range that f false ones can't
        widen: of each the f smallest and the f largest values don't count."""
        if self.rule == "none" or not self.attackers:
            return statistics
        ordered = statistics.sort(0).values
        return statistics.clamp(ordered[self.attackers], ordered[-1 - self.attackers])

    def let_through(self, cohort_size: int) -> int:
        """How many uploads of a cohort the server uses.

        >>> [Robust(rule, attackers=1).let_through(7) for rule in ("none", "krum", "multi-krum")]
        [7, 1, 4]
        """
        if self.rule == "none":
            return cohort_size
        kept = 1 if self.rule == "krum" else self.keep or cohort_size - self.attackers - 2
        return max(1, kept)

    def select(self, uploads: Params) -> Tensor | None:
        """The selected rows of uploads stacked ``[c, ...]``, ascending int64 ``[m]``; None: all."""
        if self.rule == "none" or not uploads:
            return None
        scores = krum_scores(uploads, self.attackers)
        return scores.argsort(stable=True)[: self.let_through(len(scores))].sort().values


def krum_scores(uploads: Params, attackers: int) -> Tensor:
    """s(i) of every upload: the sum of its squared distances to the c - f - 2 nearest others.

    Args:
        uploads: stacked ``[c, ...]``.
        attackers: f.

    Returns:
        float64 ``[c]``, lowest for the most trusted upload; 0 for a single one.

    >>> krum_scores({"w": torch.tensor([[0.0], [1.0], [2.0], [50.0], [3.0]])}, 1).round().tolist()
    [5.0, 2.0, 2.0, 4513.0, 5.0]
    """
    d2 = squared_distances(uploads)
    c = len(d2)
    nearest = min(c - 1, max(1, c - attackers - 2))
    others = d2 + torch.diag(d2.new_full((c,), torch.inf))
    return others.sort(1).values[:, :nearest].sum(1)
