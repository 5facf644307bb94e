"""Kinds of task whose models write texts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from .objective import OWN_METRIC, MetricFunction
from .text_metrics import WRITTEN, check_packages
from .vocabulary import VocabularyObjective

Ids = Sequence[int]


@dataclass(frozen=True)
class Written:
    """A text that a model has written: the ``answer`` to a ``prompt``, where ``reference`` is
    right."""

    prompt: str
    answer: str
    reference: str


class Writing(VocabularyObjective):
    """A model goes on from a prompt; `exercise` makes one of an example."""

    per_token = True
    counted = "tokens"
    target = "tokens"
    answer_columns = frozenset({"text"})
    metrics: ClassVar[Mapping[str, MetricFunction]] = WRITTEN
    shares = frozenset(WRITTEN) | {OWN_METRIC}

    @abstractmethod
    def exercise(self, ids: Ids, targets: Ids | None) -> tuple[Ids, Ids]:
        """Return the tokens of a prompt, and those of the right answer, from an example's ``ids``
        and its ``targets``, where the inputs are not the targets."""

    def check_metrics(self, names: Collection[str]) -> None:
        check_packages(names)

    def columns(self, answer: str) -> dict[str, Any]:
        """Return the text."""
        return {"text": answer}
