"""What every kind of task says of itself. Nothing else of the package names a kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from .cells import Cells

if TYPE_CHECKING:
    from torch import Tensor

MetricFunction = Callable[[NDArray[Any], NDArray[np.float64]], float]
"""From the targets ``[n]`` of a client and the predictions ``[n, ...]`` to a number."""


@dataclass(frozen=True)
class Scores:
    """The quality of a batch's predictions, one number an example.

    A classifier makes one prediction an example, a language model one for each target token.
    """

    loss: Tensor  # [b]: the sum over predictions, in nats
    correct: Tensor  # [b]: correct predictions
    count: Tensor  # [b]: all predictions

    def mean(self, weight: Tensor | None = None) -> Tensor:
        """Return the mean loss of a prediction; ``weight`` ``[b]`` is 0 for padding examples."""
        if weight is None:
            return self.loss.sum() / self.count.sum().clamp(min=1.0)
        return (self.loss * weight).sum() / (self.count * weight).sum().clamp(min=1.0)


@dataclass(frozen=True)
class Targets:
    """What the rows of a source are to be predicted as. ``is_known`` ``[N]`` is False for rows
    without a target, which are left out. ``classes`` are the names of class numbers, if the targets
    are any."""

    values: NDArray[Any]  # [N]
    is_known: NDArray[np.bool_]  # [N]
    classes: tuple[str, ...] = ()
    scale: tuple[float, ...] = ()  # what the outputs are to be scaled by; see `Objective.scaled`


class Objective(ABC):
    """A kind of task. One object serves all data sets and models, but where `scaled`."""

    name: ClassVar[str]  # data.task in an experiment
    target_names: ClassVar[tuple[str, ...]] = ()  # usual names of the target's column; (): none
    has_classes: ClassVar[bool] = False  # each row has one of the classes that the data name
    per_token: ClassVar[bool] = False  # logits [b, L, vocabulary]: each token is a prediction
    generates: ClassVar[bool] = False  # an input is a prompt, which the model goes on from
    auto_classes: ClassVar[Mapping[str, str]]  # of transformers, by the modality of the inputs
    metrics: ClassVar[Mapping[str, MetricFunction]] = {}  # what evaluate.metrics may name
    errors: ClassVar[frozenset[str]] = frozenset()  # metrics of which less is better
    shares: ClassVar[frozenset[str]] = frozenset()  # metrics that are shown in percent
    reported: ClassVar[tuple[str, ...]] = ()  # metrics that need not be asked for
    has_hits: ClassVar[bool] = True  # a prediction is right or wrong: there is an accuracy
    has_scale: ClassVar[bool] = False  # the model's outputs are scaled to the targets
    selects: ClassVar[str] = "loss"  # the metric that chooses the round, unless an experiment does
    exported: ClassVar[type]  # its source goes into exports: what a model says there
    peft_task: ClassVar[str | None] = None  # of PEFT's adapters

    def __eq__(self, other: object) -> bool:
        """Whether it is the same kind; processes have copies of it."""
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def scaled(self, scale: Sequence[float]) -> Objective:
        """Return the objective for targets of that ``scale``, as `Targets` has it; (): unknown."""
        return self

    @property
    def reads_targets(self) -> bool:
        """Whether the data need a column of targets."""
        return bool(self.target_names)

    def targets(self, cells: Cells, classes: tuple[str, ...] = ()) -> Targets | None:
        """Turn a column into targets; None if the inputs are the targets.

        Args:
            cells: the column.
            classes: the names of all classes, in order, if the experiment has them.

        Raises:
            InputError: the column holds something else.
        """
        return None

    def check_modality(self, modality: str) -> None:
        """Raise InputError if the task can't have such inputs."""
        if modality not in self.auto_classes:
            allowed = " or ".join(f"{name}s" for name in self.auto_classes)
            raise InputError(f"task {self.name!r} needs {allowed}; these data are {modality}s")

    def num_outputs(self, num_classes: int) -> int | None:
        """Return how many outputs a model's new head has; None: the model has its own head."""
        return None

    @abstractmethod
    def score(self, logits: Tensor, batch: Mapping[str, Tensor]) -> Scores:
        """Compute each example's loss and hits. A prediction whose loss is not a number, as after a
        fine-tuning that diverged, is no hit.

        Args:
            logits: float32 ``[b, outputs]`` or ``[b, L, vocabulary]``.
            batch: the inputs and targets.
        """

    def predictions(self, logits: Tensor) -> Tensor:
        """Return what metrics are computed from, float64 ``[b, ...]``; by default the outputs."""
        return logits.double()

    def answers(self, logits: Tensor, classes: Sequence[str]) -> list[Any]:
        """Return what ``predict`` answers for each example; by default its outputs. Where the task
        ``generates``, it answers with a text instead."""
        answers: list[Any] = logits.tolist()
        return answers

    @abstractmethod
    def columns(self, answer: Any) -> dict[str, Any]:
        """Return an answer as columns of a table; ``probabilities`` by class are one each."""

    @abstractmethod
    def column_names(self, classes: Sequence[str]) -> set[str]:
        """Return the names of all of these columns."""
