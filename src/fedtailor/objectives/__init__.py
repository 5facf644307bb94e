"""Kinds of task, one file each: their columns, targets, loss, scores, metrics and words."""

from __future__ import annotations

from ..errors import unknown
from .causal_lm import CausalLM
from .classification import Classification
from .instruct import Instruct
from .multi_label import MultiLabel
from .objective import Objective
from .preference import Preference
from .question_answering import QuestionAnswering
from .regression import Regression
from .seq2seq import Seq2Seq
from .token_classification import TokenClassification

DEFAULT: Objective = Classification()
OBJECTIVES: dict[str, Objective] = {
    one.name: one
    for one in (
        DEFAULT,
        TokenClassification(),  # whose tags are lists, too
        MultiLabel(),
        Regression(),
        QuestionAnswering(),
        CausalLM(),
        Preference(),
        Instruct(),  # before those that read an input and an output
        Seq2Seq(),
    )
}

__all__ = [
    "DEFAULT",
    "OBJECTIVES",
    "CausalLM",
    "Classification",
    "Instruct",
    "MultiLabel",
    "Preference",
    "QuestionAnswering",
    "Regression",
    "Seq2Seq",
    "TokenClassification",
    "objective_of",
]


def objective_of(task: Objective | str | None) -> Objective:
    """Return the objective that ``task`` names; None: the default.

    Raises:
        InputError: there is no such task.

    >>> objective_of("causal-lm").per_token
    True
    """
    if isinstance(task, Objective):
        return task
    if task is None:
        return DEFAULT
    if not isinstance(task, str) or task not in OBJECTIVES:
        raise unknown("task", str(task), OBJECTIVES)
    return OBJECTIVES[task]
