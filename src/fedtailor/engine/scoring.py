"""How good a model is for each client: loss and accuracy on its own held-out examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ..data.federation import Federation
from ..data.table import Indices
from ..method import Method
from ..params import Params, to_device
from ..task.task import Task

Split = Literal["validation", "test"]

EvaluatedModel = Literal["personal", "global", "novel"]
SPLITS: tuple[Split, ...] = ("validation", "test")


@dataclass(frozen=True)
class Evaluation:
    """One model on one split, a client an entry. ``num_examples`` counts predictions (target tokens
    for language modelling); where it is 0, ``loss`` and ``accuracy`` are None."""

    model: EvaluatedModel
    split: Split
    clients: tuple[int, ...]
    num_examples: tuple[int, ...]
    loss: tuple[float | None, ...]
    accuracy: tuple[float | None, ...]


@dataclass(frozen=True)
class Portion:
    """Examples that share a batch: ``rows`` of the data set, the ones at ``places`` of a split."""

    split: int
    places: Indices
    rows: Indices

    @property
    def size(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class Scoring:
    """Work on a `Portion` with one state: its examples' scores, ``[b, 3]``."""

    method: Method
    task: Task
    federation: Federation

    def one(self, server: Params, item: Portion) -> NDArray[np.float64]:
        return _score_batch(self.method, self.task, self.federation, server, item.rows)


def evaluate_one(
    scores_of: Callable[[Iterable[Portion]], Iterable[tuple[Portion, NDArray[np.float64]]]],
    federation: Federation,
    clients: Sequence[int],
    batch_size: int,
) -> list[Evaluation]:
    """One state, as the global model of all ``clients``: their examples share batches, whose scores
    ``scores_of`` gives in any order."""
    rows = [
        np.concatenate([federation.rows(client, split) for client in clients]) for split in SPLITS
    ]
    portions = (
        Portion(split, places, split_rows[places])
        for split, split_rows in enumerate(rows)
        for places in by_length(federation.dataset.inputs.lengths(split_rows), batch_size)
    )
    scores = [np.zeros((len(split_rows), 3)) for split_rows in rows]
    for portion, batch_scores in scores_of(portions):
        scores[portion.split][portion.places] = batch_scores
    sums = np.zeros((len(clients), len(SPLITS), 3))
    for number, split in enumerate(SPLITS):
        sizes = [len(federation.rows(client, split)) for client in clients]
        np.add.at(sums[:, number], np.repeat(np.arange(len(clients)), sizes), scores[number])
    return evaluations("global", clients, sums)


def evaluations(
    model: EvaluatedModel,
    clients: Sequence[int],
    sums: NDArray[np.float64],
) -> list[Evaluation]:
    """Of ``sums`` ``[n, split, 3]``: loss, hits and predictions of each client."""
    return [
        _evaluation(model, split, clients, sums[:, number]) for number, split in enumerate(SPLITS)
    ]


def _evaluation(
    model: EvaluatedModel,
    split: Split,
    clients: Sequence[int],
    sums: NDArray[np.float64],
) -> Evaluation:
    def mean(column: int) -> tuple[float | None, ...]:
        return tuple(float(s[column] / s[2]) if s[2] else None for s in sums)

    counts = tuple(int(count) for count in sums[:, 2])
    return Evaluation(model, split, tuple(clients), counts, mean(0), mean(1))


def score(
    method: Method,
    task: Task,
    federation: Federation,
    state: Params,
    rows: Indices,
    batch_size: int,
) -> NDArray[np.float64]:
    """Summed loss, hits and number of predictions of each row, ``[len(rows), 3]``."""
    scores = np.zeros((len(rows), 3))
    for at in by_length(federation.dataset.inputs.lengths(rows), batch_size):
        scores[at] = _score_batch(method, task, federation, state, rows[at])
    return scores


def _score_batch(
    method: Method, task: Task, federation: Federation, state: Params, rows: Indices
) -> NDArray[np.float64]:
    batch = to_device(federation.batch(rows), task.device)
    with torch.no_grad():
        result = task.score(method.predict(task, state, batch), batch)
    columns = (result.loss, result.correct, result.count)
    return torch.stack(columns, 1).cpu().double().numpy()


def by_length(lengths: Indices, batch_size: int) -> Iterator[Indices]:
    """The places of examples with these ``lengths``, batch by batch, the shortest first."""
    order = np.argsort(lengths, kind="stable")
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]
