"""Texts that models write in an evaluation: answers to clients' own examples, and samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice

import numpy as np
from torch import Tensor

from ..data.federation import Federation
from ..data.table import Ragged, Tokens
from ..method import Method
from ..objectives.writing import Writing as WritingObjective
from ..objectives.writing import Written
from ..params import Batch, Params
from ..task.task import Task
from ..task.writing import Ids, write
from .config import Plan
from .metrics import Metrics, MetricValues
from .scoring import SPLITS, by_length

_SHOWN = 3  # clients whose models are shown, with a prompt of each


@dataclass(frozen=True)
class Exercises:
    """The examples of a client to which a model writes answers."""

    client: int
    size: int


@dataclass(frozen=True)
class Sample:
    """A prompt of a client's validation examples, the right answer, and what models answer, by
    name: ``base``, ``global``, or the number of the client that uses the model."""

    client: int
    prompt: str
    reference: str
    answers: dict[str, str]


@dataclass(frozen=True)
class Writing:
    """Work on a client's examples with one state: answers of the model, and their metrics. A client
    has batches of its own, so that an answer never depends on other clients' examples."""

    method: Method
    task: Task
    federation: Federation
    plan: Plan
    metrics: Metrics = Metrics()

    def one(self, server: Params, item: Exercises) -> tuple[MetricValues, ...]:
        return self._metrics(item.client, server)

    def is_due(self, number: int | None) -> bool:
        """Whether models write in the evaluation of this round."""
        return number is not None and self.plan.evaluate.writes(number, self.plan.rounds)

    def metrics_of(
        self, client: int, state: Params, number: int | None
    ) -> tuple[MetricValues, ...]:
        """The metrics of the answers on each split; undefined where none are due."""
        if not self.metrics.asked:
            return ()
        return self._metrics(client, state) if self.is_due(number) else self.undefined

    @property
    def undefined(self) -> tuple[MetricValues, ...]:
        """The metrics where nothing is written."""
        return (self.metrics.of_texts(()),) * len(SPLITS)

    def _metrics(self, client: int, state: Params) -> tuple[MetricValues, ...]:
        most = self.plan.evaluate.generate.examples
        rows = [self.federation.rows(client, split)[:most] for split in SPLITS]
        texts = iter(self.texts(state, np.concatenate(rows).tolist()))  # in batches of both splits
        of_splits = ([*islice(texts, len(some))] for some in rows)
        name = self.federation.name(client)
        return tuple(self.metrics.of_texts(of, name) for of in of_splits)

    @cached_property
    def samples(self) -> dict[int, int]:
        """The rows of the data set that samples are answers to, by the clients whose models are
        shown. None where the clients' examples are elsewhere: they stay there."""
        if self.federation.remote or not self.plan.evaluate.generate.examples:
            return {}
        clients = self.plan.evaluated(self.federation)
        rows = {client: self.federation.rows(client, "validation")[:1] for client in clients}
        first = [(client, int(row[0])) for client, row in rows.items() if len(row)]
        return dict(first[:_SHOWN])

    def samples_of(self, client: int, state: Params, number: int) -> tuple[str, ...]:
        """A client's answers to `samples`; none if it shows none, or none are due."""
        if client not in self.samples or not self.is_due(number):
            return ()
        return tuple(text.answer for text in self.texts(state, [*self.samples.values()]))

    def texts(self, state: Params | None, rows: Sequence[int]) -> list[Written]:
        """The answers of a model to some rows of the data set; None: of the model as it was before
        any training."""
        task, config, dataset = self.task, self.plan.evaluate, self.federation.dataset
        objective, inputs, targets = task.backbone.objective, dataset.inputs, dataset.labels
        assert isinstance(objective, WritingObjective)
        assert isinstance(inputs, Tokens)
        pairs: list[tuple[Ids, Ids]] = [
            objective.exercise(
                inputs[row].tolist(), targets[row].tolist() if isinstance(targets, Ragged) else None
            )
            for row in rows
        ]
        logits: Callable[[Batch], Tensor] = partial(task.logits, {})
        keeps = True
        if state is not None:
            logits, keeps = partial(self.method.predict, task, state), self.method.keeps_keys
        answers: list[Ids] = [()] * len(rows)
        lengths = np.array([len(prompt) for prompt, _ in pairs])
        for places in by_length(lengths, config.batch_size):
            prompts, most = [pairs[at][0] for at in places], config.generate.tokens
            new = write(task, logits, prompts, most, keeps=keeps)
            for at, tokens in zip(places, new, strict=True):
                answers[at] = tokens
        decode = partial(task.backbone.tokenizer.decode, skip_special_tokens=True)
        return [
            Written(decode(prompt), decode(answer), decode(right))
            for (prompt, right), answer in zip(pairs, answers, strict=True)
        ]
