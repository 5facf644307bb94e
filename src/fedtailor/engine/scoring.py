"""How good a model is for each client: loss and accuracy on its own held-out examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..data.federation import Federation, pad_and_stack
from ..data.table import Indices
from ..method import Method
from ..objectives.objective import Words
from ..params import CACHED, Batch, Params, add_prefix, moved, to_device
from ..task.task import Task
from .backdoor import Trigger
from .metrics import Metrics, MetricValues

Split = Literal["validation", "test"]

EvaluatedModel = Literal["personal", "global", "novel"]
SPLITS: tuple[Split, ...] = ("validation", "test")
_AT_ONCE = 16  # batches that are scored together
ATTACK_SUCCESS = "attack_success"  # the name of a backdoor's success among the metrics


@dataclass(frozen=True)
class Evaluation:
    """One model on one split, a client an entry. ``num_examples`` counts predictions (target tokens
    for language modelling); where it is 0, ``loss`` and ``accuracy`` are None. ``metrics`` has the
    experiment's own by name, None where one is undefined; ``confusion`` ``[n, classes, classes]``
    the examples by true and predicted class, if asked for."""

    model: EvaluatedModel
    split: Split
    clients: tuple[int, ...]
    num_examples: tuple[int, ...]
    loss: tuple[float | None, ...]
    accuracy: tuple[float | None, ...]
    metrics: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    confusion: NDArray[np.int64] | None = None


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
    """Work on a `Portion` with one state: its examples' scores.

    A row of scores has the summed loss, hits and the number of predictions; with a ``trigger``
    whether the example with it is predicted as its target, and whether that is wrong. These
    ``num_sums`` are summed over a client's examples. Where metrics are asked for, the
    probabilities of the classes follow.
    """

    method: Method
    task: Task
    federation: Federation
    metrics: Metrics = Metrics()
    trigger: Trigger | None = None

    @property
    def predicts(self) -> bool:
        """Whether metrics are computed from predictions; those of texts are from `Writing`."""
        return self.metrics.asked and not self.task.backbone.objective.learns_texts

    @property
    def num_sums(self) -> int:
        return 3 if self.trigger is None else 5

    @property
    def together(self) -> bool:
        """Whether more examples than are asked for share a batch, as keeps a GPU busy."""
        return self.task.on_gpu and self.method.recordable

    def one(self, server: Params, item: Portion) -> NDArray[np.float64]:
        return self._batch(server, item.rows)

    def scores(self, state: Params, rows: Indices, batch_size: int) -> NDArray[np.float64]:
        """The scores of all ``rows``, in their order."""
        scores = np.zeros((len(rows), self.num_sums))
        lengths = self.federation.dataset.inputs.lengths(rows)
        for at in by_length(lengths, batch_size, self.task.most_tokens):
            batch_scores = self._batch(state, rows[at])
            scores = _widened(scores, batch_scores)
            scores[at] = batch_scores
        return scores

    def scores_of_all(
        self, states: Params, rows: Sequence[Sequence[Indices]], batch_size: int
    ) -> list[list[NDArray[np.float64]]]:
        """The scores of several clients' rows of each split by their own states, stacked
        ``[c, ...]``: all clients at once, and a GPU is waited for once."""
        federation, inputs = self.federation, self.federation.dataset.inputs
        size, tokens = -(-_AT_ONCE * batch_size // len(rows)), self.task.most_tokens
        tokens = None if tokens is None else max(1, tokens // len(rows))
        own = [np.concatenate(list(of_client)) for of_client in rows]
        places = [list(by_length(inputs.lengths(each), size, tokens)) for each in own]
        batches = [
            [federation.batch(each[at]) for at in of_client]
            for each, of_client in zip(own, places, strict=True)
        ]
        stacked = moved(pad_and_stack(batches), self.task.device)
        columns = torch.func.vmap(self.columns)
        found = moved([columns(states, batch) for batch in stacked], torch.device("cpu"))
        scores = []
        for client, (each, of_client) in enumerate(zip(own, places, strict=True)):
            wide = max((part.shape[-1] for part in found), default=self.num_sums)
            values = np.zeros((len(each), wide))
            for part, at in zip(found, of_client, strict=False):
                values[at, : part.shape[-1]] = part[client, : len(at)].numpy()
            ends = np.cumsum([len(of_split) for of_split in rows[client]])[:-1]
            scores.append(np.split(values, ends))
        return scores

    def metric_values(
        self, rows: Sequence[Indices], scores: Sequence[NDArray[np.float64]]
    ) -> tuple[MetricValues, ...]:
        """The metrics of one client's rows of each split; what the kind of task tunes is chosen on
        those for validation."""
        dataset, objective = self.federation.dataset, self.task.backbone.objective
        words = Words(dataset.classes, self.task.backbone.tokenizer, dataset.max_length)
        found = []
        for split, of_split, values in zip(SPLITS, rows, scores, strict=True):
            targets, predictions = dataset.targets(of_split), values[:, self.num_sums :]
            finite = len(of_split) > 0 and bool(np.isfinite(predictions).all())
            if objective.tunes and split == "validation" and finite:
                objective = objective.tuned(objective.chosen(targets, predictions))
            kept = () if dataset.rows is None else [dataset.rows[row] for row in of_split]
            compared = partial(objective.compared, rows=kept, words=words)
            found.append(self.metrics(targets, predictions, compared))
        return tuple(found)

    def _batch(self, state: Params, rows: Indices) -> NDArray[np.float64]:
        batch = to_device(self.federation.batch(rows), self.task.device)
        return self.columns(state, batch).cpu().numpy()

    def columns(self, state: Params, batch: Batch) -> Tensor:
        """The scores of a batch, float64 ``[b, columns]``; for one client, or under
        ``torch.func.vmap`` for several."""
        method, task, trigger = self.method, self.task, self.trigger
        with torch.no_grad():
            batch = task.with_reference(batch)
            if self.predicts or type(method).predict is not Method.predict:
                logits = method.predict(task, state, batch)
                result = task.score(logits, batch)
            else:
                result, _ = task.scores(method.inference_params(task, state), batch)
            columns = torch.stack((result.loss, result.correct, result.count), 1).double()
            if trigger is not None:
                marked = stamped(method, task, trigger, batch, len(columns))
                turned = method.predict(task, state, marked).argmax(-1) == trigger.target
                others = batch["labels"] != trigger.target
                columns = torch.cat([columns, torch.stack((turned & others, others), 1)], 1)
            if self.predicts:
                found = task.backbone.objective.predictions(logits, batch)
                columns = torch.cat([columns, found], 1)
        return columns


def evaluate_one(
    scores_of: Callable[[Iterable[Portion]], Iterable[tuple[Portion, NDArray[np.float64]]]],
    scoring: Scoring,
    clients: Sequence[int],
    batch_size: int,
    of_texts: Sequence[Sequence[MetricValues]] = (),
) -> list[Evaluation]:
    """One state, as the global model of all ``clients``: their examples share batches, whose scores
    ``scores_of`` gives in any order. ``of_texts`` are the metrics of texts, where there are any."""
    federation, columns = scoring.federation, scoring.num_sums
    batch_size = batch_size * _AT_ONCE if scoring.together else batch_size
    rows = [
        np.concatenate([federation.rows(client, split) for client in clients]) for split in SPLITS
    ]
    portions = (
        Portion(split, places, split_rows[places])
        for split, split_rows in enumerate(rows)
        for places in by_length(
            federation.dataset.inputs.lengths(split_rows), batch_size, scoring.task.most_tokens
        )
    )
    scores = [np.zeros((len(split_rows), columns)) for split_rows in rows]
    for portion, batch_scores in scores_of(portions):
        scores[portion.split] = _widened(scores[portion.split], batch_scores)
        scores[portion.split][portion.places] = batch_scores
    sums, parts = np.zeros((len(clients), len(SPLITS), columns)), []
    for number, split in enumerate(SPLITS):
        sizes = [federation.num_rows(client, split) for client in clients]
        losses = scores[number][:, :columns]
        np.add.at(sums[:, number], np.repeat(np.arange(len(clients)), sizes), losses)
        ends = np.cumsum(sizes)[:-1]
        parts.append((np.split(rows[number], ends), np.split(scores[number], ends)))
    values = [*of_texts]
    if scoring.predicts:
        for of_client in range(len(clients)):
            of_splits = [(rows[of_client], found[of_client]) for rows, found in parts]
            values.append(scoring.metric_values(*zip(*of_splits, strict=True)))
    return evaluations(scoring, "global", clients, sums, values)


def _widened(scores: NDArray[np.float64], like: NDArray[np.float64]) -> NDArray[np.float64]:
    """``scores`` with as many columns as ``like``."""
    missing = like.shape[1] - scores.shape[1]
    return np.pad(scores, ((0, 0), (0, missing))) if missing else scores


def evaluations(
    scoring: Scoring,
    model: EvaluatedModel,
    clients: Sequence[int],
    sums: NDArray[np.float64],
    values: Sequence[Sequence[MetricValues]],
) -> list[Evaluation]:
    """Of ``sums`` ``[n, split, 3]``: loss, hits and predictions of each client (`Scoring.num_sums`
    of them). ``values`` are the metrics of each client and split; empty if none were asked for."""
    found = []
    for number, split in enumerate(SPLITS):
        columns, of_split = sums[:, number].T, [one[number] for one in values]
        loss, hits, count = columns[:3]
        accuracy: tuple[float | None, ...] = (None,) * len(clients)
        if scoring.federation.dataset.objective.has_hits:  # else none is right or wrong
            accuracy = _ratios(hits, count)
        names = scoring.metrics.names if of_split else ()
        metrics = {name: tuple(one.values[at] for one in of_split) for at, name in enumerate(names)}
        if len(columns) > 3:
            metrics[ATTACK_SUCCESS] = _ratios(*columns[3:])
        confusion = _stacked([one.confusion for one in of_split if one.confusion is not None])
        whose = tuple(clients), tuple(map(int, count))
        losses = _ratios(loss, count)
        found.append(Evaluation(model, split, *whose, losses, accuracy, metrics, confusion))
    return found


def _ratios(sums: NDArray[np.float64], counts: NDArray[np.float64]) -> tuple[float | None, ...]:
    """``sums / counts``, by client; None where the count is 0."""
    return tuple(float(a / b) if b else None for a, b in zip(sums, counts, strict=True))


def _stacked(counts: Sequence[tuple[tuple[int, ...], ...]]) -> NDArray[np.int64] | None:
    """Confusion matrices ``[n, classes, classes]``; a client without examples has an empty one."""
    classes = max(map(len, counts), default=0)
    if not classes:
        return None
    blank = np.zeros((classes, classes), np.int64)
    return np.stack([np.array(one, np.int64) if one else blank for one in counts])


def stamped(method: Method, task: Task, trigger: Trigger, batch: Batch, count: int) -> Batch:
    """A batch whose first ``count`` examples have the ``trigger``; what is computed once for each
    example is computed anew."""
    plain = {name: value for name, value in batch.items() if not name.startswith(CACHED)}
    marked = trigger.stamped(plain, count)
    if len(plain) == len(batch):
        return marked
    with torch.no_grad():
        return marked | add_prefix(method.precompute(task, marked), CACHED)


def by_length(
    lengths: Indices, batch_size: int, most_tokens: int | None = None
) -> Iterator[Indices]:
    """The places of examples with these ``lengths``, batch by batch, the shortest first. A batch
    has at most ``most_tokens`` with padding, or one example."""
    order, start = np.argsort(lengths, kind="stable"), 0
    while start < len(order):
        places = order[start : start + batch_size]
        if most_tokens is not None:
            places = places[: max(1, most_tokens // max(1, lengths[places[-1]]))]
        yield places
        start += len(places)
