"""The settings in which methods were measured, and what they came to."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

from pydantic import TypeAdapter

from ..objectives import DEFAULT, OBJECTIVES
from ..store.metrics import Metric, higher_is_better
from ..units import counted

ALONE = "local"

Interval = tuple[float, float, float]  # a difference, and its 95 % interval


@dataclass(frozen=True)
class Population:
    """What decides which method does best: how many clients there are, how many training examples
    the median one has, and what the labels of two of them have in common, from 0 to 1 (None: that
    is not known); and what an example is."""

    number: int
    median_examples: float
    label_overlap: float | None
    task: str = DEFAULT.name
    pairs: bool = False  # an example is two texts

    def __str__(self) -> str:
        said = f"{self.number} clients with {self.median_examples:.0f} training examples each"
        if self.label_overlap is None:
            return said
        return f"{said}; their classes overlap by {100 * self.label_overlap:.0f} % (100 %: alike)"


@dataclass(frozen=True)
class Regime:
    """Of a comparison: what the examples are, whether the model is pretrained, and its task."""

    modality: Literal["text", "image"]
    pretrained: bool
    task: str = DEFAULT.name
    pairs: bool = False

    def __str__(self) -> str:
        if OBJECTIVES[self.task].generates:
            random = "a language model from random weights"
            return "a pretrained language model" if self.pretrained else random
        inputs = "texts" if self.modality == "text" else "pictures"
        inputs = "pairs of texts" if self.pairs else inputs
        model = "a pretrained model" if self.pretrained else "a network from random weights"
        return f"{inputs} and {model}"


@dataclass(frozen=True)
class Measured:
    """What a method came to on the clients' test examples: ``accuracy``, a fraction, the
    ``perplexity`` of a language model, or the ``score`` by another metric.

    ``decile`` is the accuracy of the client at the worst tenth, ``worse_off`` the share of clients
    that would have done better alone. ``over_alone`` and ``over_best`` say how far the accuracy is
    above that of training alone and of the best method, with 95 % intervals; of a language model,
    how far the loss a token is below theirs, and so of an error. ``bytes`` are those of a client in
    a round.
    ``settings`` are the method's where they are not its defaults.
    """

    worse_off: float
    over_alone: Interval
    over_best: Interval
    bytes: int
    cpu_seconds: float | None  # None: not known
    seeds: tuple[int, ...]
    settings: tuple[str, ...]
    accuracy: float | None = None
    decile: float | None = None
    perplexity: float | None = None
    score: float | None = None

    @property
    def is_ahead_of_alone(self) -> bool:
        """It is clearly ahead of training alone: the interval lies above 0."""
        return self.over_alone[1] > 0


@dataclass(frozen=True)
class Setting:
    """A setting that was measured: its clients, and its methods, the best on test data first.
    ``chosen`` is the best on validation data. Without ``has_ends`` a language model's texts had no
    end-of-text token, as they have in a run now. ``alpha`` is that of the Dirichlet distribution by
    which the data were divided; None: the clients are those of the data set. ``file`` is the
    experiment, and ``without_model`` the score of an answer that needs no model, if it is known."""

    data: str
    modality: Literal["text", "image"]
    model: str
    pretrained: bool
    targets: tuple[str, ...]
    alpha: float | None
    rounds: int
    settings: tuple[str, ...]
    clients: Population
    chosen: str
    methods: Mapping[str, Measured]
    task: str = DEFAULT.name
    has_ends: bool = True
    metric: Metric = "accuracy"
    file: str = "map"
    without_model: float | None = None

    def __str__(self) -> str:
        divided = "its own clients" if self.alpha is None else f"Dirichlet {self.alpha:g}"
        weights = "pretrained" if self.pretrained else "trained from random weights"
        how_long = f"{self.rounds} rounds, {counted(self.num_seeds, 'seed')}"
        return f"{self.data} ({divided}), {self.model} ({weights}), {how_long}"

    @property
    def kind(self) -> Regime:
        """What was compared."""
        return Regime(self.modality, self.pretrained, self.task, self.clients.pairs)

    @property
    def has_learned(self) -> bool:
        """Whether the best method is better than an answer without a model, as far as is known."""
        best = next(iter(self.methods.values()))
        score = best.score if best.accuracy is None else best.accuracy
        if score is None or self.without_model is None:
            return True
        sign = 1 if higher_is_better(self.metric) else -1
        return sign * score > sign * self.without_model

    @property
    def num_seeds(self) -> int:
        """On how many seeds the figures rest."""
        return len(self.methods[self.chosen].seeds)

    @property
    def command(self) -> str:
        """What a reader types to run it."""
        return f"fedtailor run {self.file}" + "".join(f" --set {one}" for one in self.settings)

    def distance(self, clients: Population) -> float:
        """How far other clients are from these: 1 is three times as many examples or clients, or
        0.2 of label overlap."""
        return math.hypot(*self._differences(clients).values())

    def differences(self, clients: Population) -> list[str]:
        """In what other clients differ from these, by more than half of what counts as 1 in
        `distance`."""
        return [what for what, by in self._differences(clients).items() if abs(by) > 0.5]

    def _differences(self, clients: Population) -> dict[str, float]:
        own = self.clients
        found = {
            "the number of clients": math.log(clients.number / own.number, 3),
            "the examples a client": math.log(clients.median_examples / own.median_examples, 3),
        }
        if clients.label_overlap is not None and own.label_overlap is not None:
            found["the label overlap"] = (clients.label_overlap - own.label_overlap) / 0.2
        return found


@functools.cache
def measured_settings() -> tuple[Setting, ...]:
    """All settings: those of the map, of the language models, and of other tasks."""
    content = (files(__package__) / "measured.json").read_text()
    return TypeAdapter(tuple[Setting, ...]).validate_json(content)
