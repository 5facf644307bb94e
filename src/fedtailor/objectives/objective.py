"""What every kind of task says of itself. Nothing else of the package names a kind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from .cells import Cells
from .encoding import Example, Tokenizer, Values, whole_texts
from .exported import ExportedModel

if TYPE_CHECKING:
    import torch

Tensor: TypeAlias = "torch.Tensor"  # which takes long to import
IGNORED = -100  # a target that stands for none
REFERENCE = "cached.reference"  # in a batch: what a model `compares` with
OWN_METRIC = "own_metric"  # of each client another one, by an experiment's choice
OF_ROWS = {  # of transformers, for a class or numbers a row
    "text": "AutoModelForSequenceClassification",
    "image": "AutoModelForImageClassification",
}
LEAST = 1e-9  # of a sum of weights, which is 0 for padding alone
MetricFunction = Callable[[Any, Any], float]
"""From the targets of a client's examples and the predictions, as `Objective.compared` gives them,
to a number."""


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
            return self.loss.sum() / self.count.sum().clamp(min=LEAST)
        return (self.loss * weight).sum() / (self.count * weight).sum().clamp(min=LEAST)

    def weighted(self, weight: Tensor) -> Scores:
        """Return the scores where an example counts as ``weight`` ``[b]`` of them."""
        return Scores(self.loss * weight, self.correct * weight, self.count * weight)


@dataclass(frozen=True)
class Targets:
    """What the rows of a source are to be predicted as. ``is_known`` ``[N]`` is False for rows
    without a target, which are left out. ``classes`` are the names of class numbers, if the targets
    are any. Where the targets go by tokens, ``values`` are what `Objective.encode` takes."""

    values: NDArray[Any]  # [N] or [N, outputs]
    is_known: NDArray[np.bool_]  # [N]
    classes: tuple[str, ...] = ()
    scale: tuple[float, ...] = ()  # what the outputs are to be scaled by; see `Objective.scaled`
    note: str = ""  # what is to be said of how the column was read

    def counts(self) -> dict[str, int]:
        """How often each class stands there; nothing where the targets are no classes."""
        values = self.values[self.is_known]
        if not self.classes:
            return {}
        if values.ndim > 1:
            return dict(zip(self.classes, values.sum(0).tolist(), strict=True))
        if values.dtype == object:  # of each row its number, and a class a word
            values = np.array([one for _, tags in values for one in tags if one >= 0], np.int64)
        every = np.bincount(values, minlength=len(self.classes)).tolist()
        return dict(zip(self.classes, every, strict=True))


@dataclass(frozen=True)
class Words:
    """What numbers stand for: the names of classes, the tokenizer, if there is one, and how many
    tokens of it make a sequence."""

    classes: Sequence[str] = ()
    tokenizer: Any = None
    max_length: int = 0


Roles = dict[str, str | tuple[str, ...]]
"""Columns by what they are in ``[data]``: ``text``, ``text_pair``, ``label``."""


class Objective(ABC):
    """A kind of task. One object serves all data sets and models, but where `scaled`."""

    name: ClassVar[str]  # data.task in an experiment
    meaning: ClassVar[str]  # what is learned, in a few words
    input_names: ClassVar[tuple[str, ...]] = ("text", "sentence", "content")  # usual names
    second_names: ClassVar[tuple[str, ...]] = ()  # of a second text that an input always has
    target_names: ClassVar[tuple[str, ...]] = ()  # usual names of the target's column; (): none
    takes_pairs: ClassVar[bool] = False  # an input may be two texts
    reads_words: ClassVar[bool] = False  # an input is a list of words
    nothing_learned: ClassVar[str] = "with too little text to learn from"  # rows without tokens
    joins_columns: ClassVar[bool] = False  # an input is made of several columns: `joined`
    keeps_rows: ClassVar[bool] = False  # what is compared are the rows' own inputs and targets
    takes_flags: ClassVar[bool] = False  # the targets may be several columns of 0 and 1
    names_classes: ClassVar[str] = ""  # what the names are called that the data give; "": none
    has_classes: ClassVar[bool] = False  # each row has one of these classes
    per_token: ClassVar[bool] = False  # logits [b, L, outputs]: each token is a prediction
    counted: ClassVar[str] = "examples"  # what `counts` counts
    generates: ClassVar[bool] = False  # an input is a prompt, which the model goes on from
    packs: ClassVar[bool] = False  # several inputs may share a row of tokens: `task.packing`
    has_decoder: ClassVar[bool] = False  # one part of the model reads, another writes the target
    # the shape of a row's targets: row, tokens, classes or two (numbers); "": the inputs are them
    target: ClassVar[str] = "row"
    outputs: ClassVar[int | None] = None  # of a new head; None: one a class, or the model's own
    answer_columns: ClassVar[frozenset[str]]  # of `columns`, but for the probability of each class
    auto_classes: ClassVar[Mapping[str, str]]  # of transformers, by the modality of the inputs
    metrics: ClassVar[Mapping[str, MetricFunction]] = {}  # what evaluate.metrics may name
    errors: ClassVar[frozenset[str]] = frozenset()  # metrics of which less is better
    shares: ClassVar[frozenset[str]] = frozenset()  # metrics that are shown in percent
    reported: ClassVar[tuple[str, ...]] = ()  # metrics that need not be asked for
    has_hits: ClassVar[bool] = True  # a prediction is right or wrong: there is an accuracy
    settings: ClassVar[tuple[str, ...]] = ()  # fields of [data] that only this task has
    needed_columns: ClassVar[str] = "messages, or prompt and response"  # where it joins columns
    sequences: ClassVar[int] = 1  # of a row of texts; where it may have more than one, at least
    # a model's losses of targets are compared with the pretrained model's, [b, S]: `REFERENCE`
    compares: ClassVar[bool] = False
    compares_with_received: float = 0.0  # 1: in training with the model as a client received it
    selects: ClassVar[str] = "loss"  # the metric that chooses the round, unless an experiment does
    tunes: ClassVar[str | None] = None  # a metric: a number chosen on a client's validation rows
    exported: ClassVar[type[ExportedModel]]  # its source goes into exports: what a model says there
    peft_task: ClassVar[str | None] = None  # of PEFT's adapters

    def __eq__(self, other: object) -> bool:
        """Whether it is the same kind; processes have copies of it."""
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def scaled(self, scale: Sequence[float]) -> Objective:
        """Return the objective with the `numbers` of a data set; (): unknown."""
        return self

    def numbers(self, given: Mapping[str, Any], targets: Targets | None) -> tuple[float, ...]:
        """Return what `scaled` takes, from what an experiment has for its ``settings`` (None, or
        nothing, where it has none) and the ``targets`` of the training rows."""
        return ()

    def tuned(self, value: float) -> Objective:
        """Return the objective with a value of what it ``tunes``."""
        return self

    def chosen(self, targets: Any, predictions: NDArray[np.float64]) -> float:
        """Return the best value of what it ``tunes``, on a client's validation examples: of their
        ``targets`` ``[n, ...]`` and finite `predictions` ``[n, ...]``."""
        raise NotImplementedError

    def turn_ends(self, tokenizer: Any) -> frozenset[int]:
        """Return the tokens that end an answer beside the tokenizer's own."""
        return frozenset()

    def described(self) -> dict[str, Any]:
        """Return what `exported` needs to know, for the description of an export."""
        return {}

    @property
    def takes_images(self) -> bool:
        """Whether an input may be a picture."""
        return "image" in self.auto_classes

    @property
    def writes(self) -> bool:
        """Whether the model writes texts."""
        return self.generates or self.has_decoder

    @property
    def learns_texts(self) -> bool:
        """Whether it learns these texts: the loss is a mean over tokens and has a perplexity, and
        metrics are of texts that the model writes."""
        return self.writes and not self.compares

    @property
    def reads_targets(self) -> bool:
        """Whether the data need a column of targets."""
        return bool(self.target_names)

    def targets(self, cells: Cells, classes: tuple[str, ...] = ()) -> Targets | None:
        """Turn a column into targets; None if the inputs are the targets. ``classes`` are the names
        of all classes, in order, if the experiment has them. Raises InputError where the column
        holds something else."""
        return None

    def joined(
        self, columns: Sequence[str], text: str | None, second: str | None, answer: str | None
    ) -> tuple[str, ...]:
        """Return which ``columns`` an input is made of; the others are those that are named."""
        raise NotImplementedError

    def conversations(self, columns: Sequence[Sequence[Any] | None]) -> list[str]:
        """Return the inputs that are made of the columns `joined` names, as texts."""
        raise NotImplementedError

    def recognised(self, columns: Mapping[str, Sequence[Any]]) -> Roles:
        """Return which columns of a table this task reads, if the table is surely one of its kind
        by the first values of each column; else nothing."""
        return {}

    def encode(
        self, values: Values, targets: Values | None, tokenizer: Tokenizer, max_length: int
    ) -> Iterator[Example]:
        """Yield the examples of some texts, pairs of texts (tuples) or lists of words, with at most
        ``max_length`` tokens a sequence. ``targets`` are `Targets.values` of each, where these go
        by tokens; None: by rows. The tokenizer is a fast one."""
        return whole_texts(values, tokenizer, max_length)

    def encode_prompts(
        self, values: Values, tokenizer: Tokenizer, max_length: int
    ) -> Iterator[Example]:
        """Yield the examples of some inputs whose targets are not known."""
        return self.encode(values, None, tokenizer, max_length)

    def blank_targets(self, rows: int, tokens: int, num_classes: int) -> NDArray[Any] | None:
        """Return targets of ``rows`` that have so many tokens each; None: the inputs are."""
        sizes = {"row": [], "tokens": [tokens], "classes": [num_classes], "two": [2]}
        return np.zeros([rows, *sizes[self.target]], np.int64) if self.target else None

    def check_modality(self, modality: str) -> None:
        """Raise InputError if the task can't have such inputs."""
        if modality not in self.auto_classes:
            allowed = " or ".join(f"{name}s" for name in self.auto_classes)
            raise InputError(f"task {self.name!r} needs {allowed}; these data are {modality}s")

    def check_metrics(self, names: Collection[str]) -> None:
        """Raise InputError if a package is missing that one of these metrics needs."""
        return None

    def num_outputs(self, num_classes: int) -> int | None:
        """Return how many outputs a model's new head has; None: the model has its own head."""
        return num_classes if self.names_classes else self.outputs

    def counts(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return how many predictions each example of a batch is, float32 ``[b]``."""
        import torch

        first = next(iter(batch.values()))
        return torch.ones(len(first), device=first.device)

    @abstractmethod
    def score(self, logits: Tensor, batch: Mapping[str, Tensor]) -> Scores:
        """Compute each example's loss and hits. A prediction whose loss is not a number, as after a
        fine-tuning that diverged, is no hit. The logits are float32 ``[b, outputs]`` or ``[b, L,
        vocabulary]``; the batch has inputs and targets."""

    def predictions(self, logits: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Return what metrics and answers are computed from, float64 ``[b, ...]``; by default the
        outputs. Rows of several batches are padded with zeros to one width. The batch has targets
        where they are known."""
        return logits.double()

    def compared(
        self, targets: Any, predictions: NDArray[np.float64], rows: Sequence[Any], words: Words
    ) -> tuple[Any, Any]:
        """Return what a metric function takes: a client's targets and the predictions of them, from
        numbers ``[n, ...]``, or n arrays where targets go by tokens, and what `predictions` gave,
        ``[n, ...]``. ``rows`` are the inputs and targets of the source, if the task ``keeps_rows``.
        """
        return targets, predictions

    def answers(
        self, predictions: NDArray[np.float64], inputs: Sequence[Any], words: Words
    ) -> list[Any]:
        """Return what ``predict`` answers for each of some ``inputs``; by default its outputs.
        Where the task ``writes``, it answers with a text instead."""
        answers: list[Any] = predictions.tolist()
        return answers

    def undefined(self, targets: Any, classes: Sequence[str]) -> Collection[str]:
        """Return the metrics that no prediction gives a client with these ``targets``."""
        return ()

    def summary(self, targets: Any, classes: Sequence[str]) -> str:
        """Return what is worth saying of all ``targets`` ``[N, ...]`` (N arrays where they go by
        tokens) before a run, in a few words; empty if nothing is."""
        return ""

    @abstractmethod
    def columns(self, answer: Any) -> dict[str, Any]:
        """Return an answer as columns of a table; ``probabilities`` by class are one each."""

    def column_names(self, classes: Sequence[str]) -> set[str]:
        """Return the names of all of these columns."""
        names = classes if "probabilities" in self.answer_columns else ()
        return {*self.answer_columns, *(f"p({name})" for name in names)}
