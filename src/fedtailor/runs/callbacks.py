"""What is called after each committed round, and may stop a method with its seed there."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Literal

from ..engine.results import Round
from ..errors import InputError
from ..store.metrics import Metric, best_round, summary
from ..store.read import read_trial
from ..store.selection import Model, by_round


class Stop(Enum):
    """The type of `STOP`."""

    STOP = "stop"


STOP = Stop.STOP
"""What a callback returns to stop the method, with this seed, after this round."""


@dataclass(frozen=True)
class CommittedRound:
    """A round that counts: of the method ``label`` with ``seed``, of ``rounds`` in all. ``folder``
    is that of the trial in the run directory. ``select`` is the metric that chooses the
    reported round.
    """

    label: str
    seed: int
    rounds: int
    folder: Path
    select: Metric
    round: Round

    @property
    def number(self) -> int:
        """The round's number; the first is 1."""
        return self.round.number

    @property
    def train_loss(self) -> float:
        """The mean training loss over the cohort; nan if nobody is in it."""
        loss = self.round.train_loss
        return math.nan if loss is None else loss

    def score(
        self,
        metric: Metric | None = None,
        *,
        model: Model = "personal",
        split: Literal["validation", "test"] = "validation",
    ) -> float | None:
        """The mean over clients of ``metric`` (None: `select`) after this round; None if it was not
        evaluated, or is defined for no client.

        Raises:
            InputError: the run has no such metric.
        """
        for one in self.round.evaluations:
            if (one.model, one.split) == (model, split) and any(one.num_examples):
                found = summary(one, metric or self.select)
                return found.mean if found.clients else None
        return None


OnRound = Callable[[CommittedRound], Stop | None]


@dataclass
class EarlyStopping:
    """A callback that stops a method with its seed once the validation score has not improved for
    ``patience`` evaluations. It judges by the metric that chooses the reported round, so what is
    reported stays the same."""

    patience: int = 5
    model: Model = "personal"
    _scores: dict[Path, dict[int, float]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise InputError(f"patience = {self.patience}: must be at least 1")

    def __call__(self, done: CommittedRound) -> Stop | None:
        score = done.score(model=self.model)
        if score is None:
            return None
        if done.folder not in self._scores:  # a resumed trial has rounds that were not seen here
            trial = read_trial(done.folder, done.label, "", done.seed)
            evaluated = by_round(trial, self.model, "validation")
            self._scores[done.folder] = {
                number: found.mean
                for number, one in evaluated.items()
                if (found := summary(one, done.select)).clients
            }
        scores = self._scores[done.folder]
        scores[done.number] = score
        best = best_round(scores, done.select)
        return STOP if sum(number > best for number in scores) >= self.patience else None
