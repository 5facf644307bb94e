"""All checks of a method, one after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..engine.checks import check
from ..errors import InputError, of_method
from ..method import Method
from ..task.task import Task
from ..temporary_folder import temporary_folder
from ..user_code import own_faults
from .case import Case, CheckFailedError
from .checks import CHECKS, runs
from .subjects import Subject, pictures, texts

_FAULTS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError)


@dataclass(frozen=True)
class Outcome:
    """What became of a check on a subject: ``problem`` is empty if it passed."""

    check: str
    subject: str
    problem: str = ""


def check_method(method: Method, on: Sequence[Subject] = ()) -> None:
    """Check that a method does what every method must.

    Runs clients of different sizes on small models, on the CPU: some seconds in all. The checks are
    `checks.CHECKS`: clients that run together get the numbers that each gets alone, padding changes
    nothing, nothing private is sent, a resumed run ends with the same bytes, the loss falls, ...

    Args:
        method: with the fields to be checked.
        on: the models and clients; (): `pictures` and `texts`. Where the method refuses a model by
            an InputError, it is not checked on it.

    Raises:
        CheckFailedError: one line for each check that failed.
        InputError: the method refuses all models.

    >>> from fedtailor import FedAvg
    >>> check_method(FedAvg(), on=[pictures()])
    """
    done = list(outcomes(method, on))
    problems = [f"- {o.check}, on {o.subject}: {o.problem}" for o in done if o.problem]
    if problems:
        title = f"{type(method).__name__} fails {len(problems)} of {len(done)} checks:"
        raise CheckFailedError("\n".join([title, *problems]))


def outcomes(method: Method, on: Sequence[Subject] = ()) -> Iterator[Outcome]:
    """Yield the outcome of each check as it comes; `check_method` says on what.

    Raises:
        InputError: the method refuses all models.
    """
    if not dataclasses.is_dataclass(method) or "__dataclass_params__" not in vars(type(method)):
        raise InputError(f"{type(method).__name__} must be a frozen dataclass")
    refusals: list[str] = []
    subjects = on or (pictures(), texts())
    for subject in subjects:
        if reason := refusal(method, subject):
            refusals.append(f"{subject.name}: {reason}")
            continue
        with temporary_folder("fedtailor-check-") as folder:
            case = Case(method, subject, folder)
            for one in CHECKS:
                outcome = _outcome(one, case)
                yield outcome
                if one is runs and outcome.problem:
                    break  # the others would say the same
    if len(refusals) == len(subjects):
        raise InputError(f"{type(method).__name__} can't be checked: {'; '.join(refusals)}")


def refusal(method: Method, subject: Subject) -> str:
    """Why the method does not work on the subject's model; empty if it may."""
    try:
        with own_faults(), of_method(method.name):
            task = Task(subject.backbone, method.adapt)
            check(method, task, subject.federation, subject.plan)
            method.check_batch(task, subject.federation.dataset.batch(np.arange(2)))
    except InputError as error:
        return str(error)
    return ""


def _outcome(check: Callable[[Case], None], case: Case) -> Outcome:
    problem = ""
    try:
        with own_faults():
            check(case)
    except CheckFailedError as error:
        problem = str(error)
    except (InputError, *_FAULTS) as error:
        text = " ".join(str(error).split())[:300]
        problem = text if isinstance(error, InputError) else f"{type(error).__name__}: {text}"
    return Outcome(check.__name__.replace("_", " "), case.subject.name, problem)
