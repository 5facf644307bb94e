"""The results of a trained method's models, beside always answering the most frequent class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import listed
from ..inference.onboard import Onboarded, read_result
from ..report.names import client_name
from ..runs.trained import TrainedMethod
from ..store.metrics import bare
from ..store.read import Trial, read
from ..store.records import EvaluationLine, Partition
from ..store.selection import Model, by_round


@dataclass(frozen=True)
class SplitScore:
    """A model's result on one split, after a round.

    ``majority`` is the accuracy of always answering the most frequent class of the client's
    training examples, on the same examples, as far as the run has kept it; ``answer`` is that
    class, None where several clients have one each.
    """

    split: str
    round: int
    examples: int
    accuracy: float | None
    loss: float | None
    majority: float | None = None
    answer: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_no_better(self) -> bool:
        """The model is not above always answering the most frequent class."""
        if self.majority is None or self.accuracy is None:
            return False
        return self.accuracy <= self.majority


@dataclass(frozen=True)
class ModelScores:
    """The results of the models of ``trained``."""

    trained: TrainedMethod
    trial: Trial
    partition: Partition

    @classmethod
    def read(cls, trained: TrainedMethod) -> ModelScores:
        """Read them in the run directory."""
        run = read(trained.run, only=(trained.label, trained.seed))
        return cls(trained, run.trials[0], run.partitions[trained.seed])

    def of(self, client: str | int | None) -> list[SplitScore]:
        """Those of a client's model, also one that joined afterwards; None: of the global one."""
        trained = self.trained
        if client is None:
            return self._at(("global",), None, trained.global_round)
        if (joined := trained.onboarded(client)) is not None:
            return _joined_scores(read_result(joined))
        return self._at(("personal", "novel"), trained.number(client), trained.round)

    def _at(self, models: Sequence[Model], client: int | None, round_: int) -> list[SplitScore]:
        kinds = ((model, split) for split in ("validation", "test") for model in models)
        evaluations = (by_round(self.trial, *kind).get(round_) for kind in kinds)
        found = (_score(one, self.partition, client) for one in evaluations if one is not None)
        return [score for score in found if score is not None]

    def doubts(self, clients: Sequence[str | int | None]) -> str | None:
        """Say in a line which of these clients' models, or the global one (None), are no better on
        test examples than always answering the most frequent class; None: all are."""
        poor = {
            client: score
            for client in clients
            for score in self.of(client)
            if score.split == "test" and score.is_no_better
        }
        if not poor:
            return None
        label = self.trained.label
        if len(clients) > 1:
            return (
                f"on test examples {label} is no better than always answering the most frequent "
                f"class for {len(poor)} of {len(clients)} clients: {listed([*map(str, poor)])}"
            )
        ((client, score),) = poor.items()
        of = "the global model of " if client is None else ""
        at = "" if client is None else f" at {client_name(str(client), None)}"
        answer = "the most frequent class" if score.answer is None else repr(score.answer)
        ours, theirs = (bare("accuracy", value) for value in (score.accuracy, score.majority))
        return (
            f"on test examples {of}{label}{at} ({ours} %) is no better than always answering "
            f"{answer} ({theirs} %)"
        )


def _joined_scores(joined: Onboarded) -> list[SplitScore]:
    """The results of the model that a client keeps that joined afterwards."""
    found = []
    for split, values in joined.scores[joined.kept].items():
        if count := values["count"]:
            most = joined.scores.get("majority", {}).get(split, {}).get("accuracy")
            usual = ("accuracy", "loss", "count")
            metrics = {k: v for k, v in values.items() if k not in usual and v is not None}
            about = split, joined.round, int(count), values["accuracy"], values["loss"], most
            found.append(SplitScore(*about, metrics=metrics))
    return found


def _score(
    evaluation: EvaluationLine, partition: Partition, client: int | None
) -> SplitScore | None:
    """The result of one client, or the mean over all predictions."""
    places = [i for i, number in enumerate(evaluation.clients) if client in (None, number)]
    examples = sum(evaluation.num_examples[i] for i in places)
    if not examples:
        return None

    def mean(values: Any) -> float | None:
        known = [i for i in places if values[i] is not None]
        total = sum(evaluation.num_examples[i] * values[i] for i in known)
        counted = sum(evaluation.num_examples[i] for i in known)
        return float(total / counted) if counted else None

    majority = answer = None
    if evaluation.split == "test" and (known := partition.majority_accuracy(evaluation.clients)):
        majority = mean(known)
        if client is not None and partition.majority is not None:
            answer = partition.classes[int(partition.majority[client])]
    accuracy, loss = mean(evaluation.accuracy), mean(evaluation.loss)
    found = {name: mean(values) for name, values in evaluation.metrics.items()}
    metrics = {k: v for k, v in found.items() if v is not None}
    round_, split = evaluation.round, evaluation.split
    return SplitScore(split, round_, examples, accuracy, loss, majority, answer, metrics)
