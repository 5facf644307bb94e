"""Local: every client trains alone from the same start; nothing is ever sent.

    client k:  w_k <- w_k - eta grad l(w_k; b) over its batches b

Training together is of use only where it beats this. Where T rounds have M of K clients each, every
client trains max(1, round(T M / K)) times: what a client of another method trains on average. Its
n-th training has the mean learning rate of the rounds that it stands for. Nothing travels, so
nothing is lost or late. Differs from the paper: there is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..method import FineTuning
from ..task.task import Task


@dataclass(frozen=True)
class Local(FineTuning):
    """Training without a federation: the whole state is private."""

    name: ClassVar[str] = "local"
    family: ClassVar[str] = "local"
    trains_alone: ClassVar[bool] = True

    def is_private(self, task: Task, name: str) -> bool:
        return True
