"""Robust aggregation: rules against uploads that are wrong, or made to do harm.

A cohort's c uploads u_i, of which f may be false. First, uploads may be changed (``before``):
    clip: u_i is brought to a distance of at most ``radius`` from the server's own state
    nnm: u_i becomes the mean of the c - f uploads nearest to it, itself included
    bucketing: uploads in random order become means of ``bucket`` of them
Then a rule selects uploads, which the method aggregates with its own weights:
    krum: the one of the smallest score s(i), the sum of its squared distances to the c - f - 2
        nearest others; multi-krum: the ``keep`` ones of the smallest scores
    mda: the c - f uploads whose largest distance from each other is the smallest
or makes one upload of all, in place of their weighted mean (`robust.combined`):
    median, trimmed-mean, meamed: by coordinate
    geometric-median, centred-clipping, bulyan

Sources, by rule:
- krum, multi-krum: P. Blanchard et al. Machine Learning with Adversaries. NeurIPS 2017.
- mda: E. M. El Mhamdi et al. Genuinely Distributed Byzantine Machine Learning. PODC 2020.
- median, trimmed-mean: D. Yin et al. Byzantine-Robust Distributed Learning. ICML 2018.
- meamed: C. Xie et al. Generalized Byzantine-tolerant SGD. arXiv 1802.10116.
- geometric-median: K. Pillutla et al. Robust Aggregation for Federated Learning. IEEE TSP 2022.
- centred-clipping: S. P. Karimireddy et al. Learning from History. ICML 2021.
- bulyan: E. M. El Mhamdi et al. The Hidden Vulnerability of Distributed Learning. ICML 2018.
- nnm: Y. Allouah et al. Fixing by Mixing. AISTATS 2023.
- bucketing: S. P. Karimireddy et al. Byzantine-Robust Learning on Heterogeneous Datasets via
  Bucketing. ICLR 2022.

Differs from the papers:
- The method aggregates the selected uploads, with its own weights; Krum's paper takes their mean.
- Distances leave running statistics of batch normalisations out: they differ between clients by far
  more than updates do. Statistics get the weights of their upload. Before that each is cut to the
  range that is left without the f smallest and the f largest values of the cohort.
- Where members of the cohort are missing, f becomes as small as the others need.
- In a cohort of three or fewer, where c - f - 2 < 1, Krum's score is the distance of the nearest
  upload. Multi-Krum's m is c - f - 2 unless ``keep`` says otherwise; the paper leaves it open.
- ``radius`` is the median distance of the round's uploads from the server's state, unless it is
  set.
- The geometric median starts from a mean that weighs far uploads down, not from the plain mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Annotated, Literal, get_args

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from ..errors import InputError, TooFewUploadsError
from ..params import Params
from ..stacked import squared_distances

Selection = Literal["krum", "multi-krum", "mda"]
Combination = Literal[
    "median", "trimmed-mean", "meamed", "geometric-median", "centred-clipping", "bulyan"
]
Rule = Literal["none", Selection, Combination]
Step = Literal["clip", "nnm", "bucketing"]
SELECTIONS: tuple[str, ...] = get_args(Selection)
COMBINATIONS: tuple[str, ...] = get_args(Combination)
_IDLE_WITHOUT = {"nnm", "mda", "trimmed-mean", "meamed", "bulyan"}  # attackers: a mean of all
_USED_BY = {
    "keep": ("multi-krum",),
    "radius": ("clip", "centred-clipping"),
    "bucket": ("bucketing",),
    "steps": ("geometric-median", "centred-clipping"),
}
_MOST_SUBSETS = 200_000  # that mda tries


@dataclass(frozen=True)
class Robust:
    """A rule, and the number of a cohort's uploads that may be false (f).

    ``before`` are changes before the rule, in their order. ``keep`` is multi-krum's m. ``radius``
    is that of clip and of centred-clipping; None: the median distance of the uploads from the
    server's state. ``bucket`` is the number of uploads in a bucket. ``steps`` are those of the
    iterative rules, geometric-median and centred-clipping.
    """

    rule: Rule = "none"
    attackers: Annotated[int, Ge(0), Le(1_000_000_000)] = 0
    keep: Annotated[int, Gt(0), Le(1_000_000_000)] | None = None  # None: c - f - 2, at least 1
    before: tuple[Step, ...] = ()
    radius: Annotated[float, Gt(0), Le(1e12)] | None = None
    bucket: Annotated[int, Gt(0), Le(1_000_000_000)] = 2
    steps: Annotated[int, Gt(0), Le(10_000)] = 10

    @property
    def is_active(self) -> bool:
        """Whether it does anything."""
        return self.rule != "none" or bool(self.before)

    @property
    def combines(self) -> bool:
        """Whether the rule makes one upload of all."""
        return self.rule in COMBINATIONS

    @property
    def makes_one(self) -> bool:
        """Whether one upload is made of all, by the rule or by means of buckets."""
        return self.combines or "bucketing" in self.before

    @property
    def needs_state(self) -> bool:
        """Whether distances from the server's own state count."""
        return "clip" in self.before or self.rule == "centred-clipping"

    def check(self, cohort_size: int) -> None:
        """Raise InputError if a cohort of so many uploads is too small for ``attackers`` or
        ``keep``, if nothing uses a setting, or if the rule would do nothing."""
        for name, users in _USED_BY.items():
            value = getattr(self, name)
            if value != getattr(Robust(), name) and not {self.rule, *self.before} & {*users}:
                raise InputError(
                    f"robust.{name} = {value} is for {' and '.join(map(repr, users))}; "
                    f"robust.rule is {self.rule!r}, robust.before {list(self.before)}"
                )
        if len(set(self.before)) < len(self.before):
            raise InputError(f"robust.before = {list(self.before)} names a step twice")
        if self.rule == "none" and "nnm" not in self.before:
            if self.attackers:
                raise InputError(
                    f"robust.attackers = {self.attackers} without a rule; robust.rule may be "
                    + ", ".join(map(repr, (*SELECTIONS, *COMBINATIONS)))
                )
            return
        most = self._most_attackers(cohort_size)
        idle = {*self.before, self.rule} & _IDLE_WITHOUT if not self.attackers else set()
        if idle:
            raise InputError(
                f"robust.attackers = 0, with which {min(idle)!r} withstands nobody; allowed: 1 or "
                "more"
            )
        if self.attackers > most:
            steps = f" after {', '.join(self.before)}" if self.before else ""
            rule = f"rule {self.rule!r}{steps}"
            raise InputError(
                f"robust.attackers = {self.attackers} under {rule} needs the uploads of at "
                f"least {self._least_cohort} clients; a round has {cohort_size}; allowed: up to "
                f"{most}"
            )
        if self.keep is not None and self.keep > cohort_size - self.attackers:
            raise InputError(
                f"robust.keep = {self.keep} is more than the {cohort_size - self.attackers} "
                f"clients that are no attackers; allowed: 1 to {cohort_size - self.attackers}"
            )
        # with more than 18 attackers a smaller number, which is still above the limit
        subsets = math.comb(self._rows(cohort_size), min(self.attackers, 18))
        if self.rule == "mda" and subsets > _MOST_SUBSETS:
            raise InputError(
                f"rule 'mda' would try more than {_MOST_SUBSETS:,} subsets of {cohort_size} "
                "uploads. Take 'multi-krum'"
            )

    def check_method(self, name: str, *, needs_only_mean: bool, sends_updates: bool) -> None:
        """Raise InputError if the rule doesn't go with a method of this ``name``."""
        if needs_only_mean:
            return
        if self.makes_one:
            what = f"robust.rule = {self.rule!r}" if self.combines else "bucketing"
            raise InputError(
                f"{what} makes one upload of several, but {name} needs each client's; rules for "
                f"{name}: {', '.join(map(repr, SELECTIONS))}, after 'clip' or 'nnm'"
            )
        if self.needs_state and not sends_updates:
            raise InputError(
                f"'clip' needs uploads that can be compared with the server's state; those of "
                f"{name} can't; allowed in robust.before: 'nnm'"
            )

    def _rows(self, cohort_size: int) -> int:
        """How many uploads the rule gets."""
        return -(-cohort_size // self.bucket) if "bucketing" in self.before else cohort_size

    @property
    def _needed(self) -> tuple[int, int]:
        """(a, b): the rule needs a f + b rows, for f >= 1."""
        if self.rule in ("krum", "multi-krum"):
            return 2, 3
        return (4, 3) if self.rule == "bulyan" else (2, 1)

    def _most_attackers(self, cohort_size: int) -> int:
        each, more = self._needed
        return max(0, (self._rows(cohort_size) - more) // each)

    @property
    def _least_cohort(self) -> int:
        """The smallest cohort for f >= 1 attackers."""
        each, more = self._needed
        rows = each * self.attackers + more
        return (rows - 1) * self.bucket + 1 if "bucketing" in self.before else rows

    def among(self, present: int) -> Robust:
        """The rule for a round in which so many of the cohort's uploads are there: it withstands as
        many attackers as they allow. Each member that is missing may have been one of them. Raises
        TooFewUploadsError where fewer than three are there, which can't show who is false.

        >>> Robust("krum", attackers=2).among(6).attackers
        1
        """
        if self.attackers and present < 3:
            raise TooFewUploadsError(
                f"{present} upload{' is' if present == 1 else 's are'} there; with "
                f"robust.attackers = {self.attackers} at least 3 are needed"
            )
        attackers = min(self.attackers, self._most_attackers(present))
        keep = None if self.keep is None else min(self.keep, present - attackers)
        return replace(self, attackers=attackers, keep=keep)

    def bound(self, statistics: Tensor) -> Tensor:
        """``statistics`` ``[c, ...]``, which are not scored, cut to a range that f false ones can't
        widen: of each the f smallest and the f largest values don't count."""
        if not self.attackers:
            return statistics
        ordered = statistics.sort(0).values
        return statistics.clamp(ordered[self.attackers], ordered[-1 - self.attackers])

    def let_through(self, cohort_size: int) -> int:
        """How many uploads of a cohort the method's `aggregate` gets.

        >>> [Robust(rule, attackers=1).let_through(7) for rule in ("none", "krum", "multi-krum")]
        [7, 1, 4]
        """
        rows = self._rows(cohort_size)
        if self.rule == "mda":
            return rows - self.attackers
        if self.rule in ("krum", "multi-krum"):
            return self._kept(rows)
        return 1 if self.combines else rows

    def _kept(self, rows: int) -> int:
        """How many of the rows that Krum gets it keeps."""
        return 1 if self.rule == "krum" else max(1, self.keep or rows - self.attackers - 2)

    def select(self, uploads: Params) -> Tensor | None:
        """The selected rows of uploads stacked ``[c, ...]``, ascending int64 ``[m]``; None: all."""
        if self.rule not in SELECTIONS or not uploads:
            return None
        d2 = squared_distances(uploads)
        if self.rule == "mda":
            return smallest_diameter(d2, len(d2) - self.attackers)
        scores = krum_scores(d2, self.attackers)
        return scores.argsort(stable=True)[: self._kept(len(d2))].sort().values


def krum_scores(d2: Tensor, attackers: int) -> Tensor:
    """s(i) of every upload ``[c]``, from squared distances ``[c, c]``: their sum to the c - f - 2
    nearest others; lowest for the most trusted upload, and 0 for a single one.

    >>> x = torch.tensor([0.0, 1.0, 2.0, 50.0, 3.0])
    >>> krum_scores((x[:, None] - x) ** 2, 1).tolist()
    [5.0, 2.0, 2.0, 4513.0, 5.0]
    """
    c = len(d2)
    nearest = min(c - 1, max(1, c - attackers - 2))
    others = d2 + torch.diag(d2.new_full((c,), torch.inf))
    return others.sort(1).values[:, :nearest].sum(1)


def smallest_diameter(d2: Tensor, size: int) -> Tensor:
    """The subset of ``size`` rows whose largest distance is the smallest, ascending int64
    ``[size]``; of equal ones the first.

    >>> x = torch.tensor([0.0, 9.0, 1.0, 2.0])
    >>> smallest_diameter((x[:, None] - x) ** 2, 3).tolist()
    [0, 2, 3]
    """
    subsets = torch.tensor(list(combinations(range(len(d2)), size)), device=d2.device)
    widest = torch.zeros(len(subsets), dtype=d2.dtype, device=d2.device)
    for i in range(size):
        for j in range(i):
            widest = torch.maximum(widest, d2[subsets[:, i], subsets[:, j]])
    return subsets[int(widest.argmin())]
