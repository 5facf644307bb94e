"""How good a model is for each client: loss and accuracy on its own held-out examples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Ge, Gt
from numpy.typing import NDArray

from .data.table import Indices
from .federation import Federation
from .method import Method
from .params import Params
from .task import Task

Split = Literal["validation", "test"]
SPLITS: tuple[Split, ...] = ("validation", "test")


@dataclass(frozen=True)
class EvaluateConfig:
    """When and on whom models are evaluated."""

    every: Annotated[int, Gt(0)] = 1  # rounds; the last round always is
    clients: Annotated[int, Gt(0)] | None = None  # a fixed sample of so many clients; None: all
    batch_size: Annotated[int, Gt(0)] = 64
    global_model: bool = True  # beside the personal models
    novel_passes: Annotated[int, Ge(0)] = 1  # local training of a client that never took part

    def due(self, round_: int, rounds: int) -> bool:
        """Whether round ``round_`` of ``rounds`` is evaluated."""
        return round_ % self.every == 0 or round_ == rounds


@dataclass(frozen=True)
class Evaluation:
    """One model on one split, a client an entry. ``num_examples`` counts predictions (target tokens
    for language modelling); where it is 0, ``loss`` and ``accuracy`` are None."""

    model: Literal["personal", "global", "novel"]
    split: Split
    clients: tuple[int, ...]
    num_examples: tuple[int, ...]
    loss: tuple[float | None, ...]
    accuracy: tuple[float | None, ...]


def evaluate_one(
    method: Method,
    task: Task,
    federation: Federation,
    state: Params,
    clients: Sequence[int],
    batch_size: int,
) -> list[Evaluation]:
    """One state, as the global model of all ``clients``: their examples share batches."""
    found = []
    for split in SPLITS:
        rows = [federation.rows(client, split) for client in clients]
        owner = np.repeat(np.arange(len(clients)), [len(part) for part in rows])
        scores = _score(method, task, federation, state, np.concatenate(rows), batch_size)
        sums = np.zeros((len(clients), 3))
        np.add.at(sums, owner, scores)
        found.append(_evaluation("global", split, clients, sums))
    return found


def evaluate_each(
    method: Method,
    task: Task,
    federation: Federation,
    states: Iterable[tuple[int, Params]],
    batch_size: int,
) -> list[Evaluation]:
    """(client, personal state) pairs in any order, each on its own client's examples."""
    sums: dict[int, NDArray[np.float64]] = {}
    for client, state in states:
        sums[client] = np.stack(
            [
                _score(method, task, federation, state, federation.rows(client, split), batch_size)
                .sum(0)
                for split in SPLITS
            ]
        )  # fmt: skip
    clients = sorted(sums)
    table = np.stack([sums[client] for client in clients])  # [n, split, 3]
    return [_evaluation("personal", s, clients, table[:, i]) for i, s in enumerate(SPLITS)]


def _evaluation(
    model: Literal["personal", "global"],
    split: Split,
    clients: Sequence[int],
    sums: NDArray[np.float64],
) -> Evaluation:
    def mean(column: int) -> tuple[float | None, ...]:
        return tuple(float(s[column] / s[2]) if s[2] else None for s in sums)

    counts = tuple(int(count) for count in sums[:, 2])
    return Evaluation(model, split, tuple(clients), counts, mean(0), mean(1))


def _score(
    method: Method,
    task: Task,
    federation: Federation,
    state: Params,
    rows: Indices,
    batch_size: int,
) -> NDArray[np.float64]:
    """Summed loss, hits and number of predictions of each row, ``[len(rows), 3]``."""
    scores = np.zeros((len(rows), 3))
    for at in _by_length(federation.dataset.inputs.lengths(rows), batch_size):
        batch = federation.batch(rows[at])
        batch = {name: value.to(task.device) for name, value in batch.items()}
        with torch.no_grad():
            result = task.score(method.predict(task, state, batch), batch)
        columns = (result.loss, result.correct, result.count)
        scores[at] = torch.stack(columns, 1).cpu().double().numpy()
    return scores


def _by_length(lengths: Indices, batch_size: int) -> Iterator[Indices]:
    order = np.argsort(lengths, kind="stable")
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]
