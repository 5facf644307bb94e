"""The row beside the methods: each client's most frequent training class, on the same examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

import numpy as np

from .metrics import Summary, summarise
from .records import Evaluation, Partition
from .select import Entry, select_by, select_round

_FEWEST_EXAMPLES = 10  # of a client's test data, before a method is said not to have learned there
_MARGIN = 0.1  # of accuracy, by which another method must be better there
NOT_LEARNED = "did not learn"  # a method whose mean is not above that of the majority class


def majority_accuracy(partition: Partition, evaluation: Evaluation) -> list[float | None] | None:
    """Return the accuracy of each client's most frequent training class on the client's own test
    examples, in the order of ``evaluation.clients``; None for a client without test examples.

    None instead of a list where it is unknown: for language models, over Flower, in runs of older
    versions.
    """
    if partition.majority_correct is None or not len(evaluation.clients):
        return None
    clients = np.array(evaluation.clients)
    correct, sizes = partition.majority_correct[clients], partition.test[clients]
    if (correct < 0).any():
        return None
    return [int(c) / int(n) if n else None for c, n in zip(correct, sizes, strict=True)]


def majority_summary(partition: Partition, evaluation: Evaluation) -> Summary | None:
    """Summarise `majority_accuracy` over clients."""
    accuracy = majority_accuracy(partition, evaluation)
    if accuracy is None:
        return None
    return summarise(accuracy, evaluation.num_examples, higher_is_better=True)


@dataclass(frozen=True)
class AtMajority:
    """A client for which a method is no better than the client's most frequent class, while the
    method ``better`` is. Values are test accuracies; ``seed`` is None where a client of that name
    is the same one with every seed."""

    client: str
    seed: int | None
    accuracy: float
    majority: float
    better: str
    better_accuracy: float


_Client = tuple[str, int | None]
_Known = tuple[float, float, int]  # accuracy, that of the most frequent class, test examples


def at_majority(entries: Sequence[Entry]) -> dict[str, tuple[AtMajority, ...]]:
    """Return by method the clients for which it is no better than their most frequent class, though
    another one of ``entries`` is at least 10 points better; those that could gain most first.

    Clients need 10 test examples.
    """
    named = all(p.names is not None for e in entries for p in e.run.partitions.values())
    several = len({trial.seed for e in entries for trial in e.trials}) > 1
    known = {entry.label: _by_client(entry, by_seed=several and not named) for entry in entries}
    found = {}
    for label, clients in known.items():
        losers = []
        for client, (accuracy, majority, n) in clients.items():
            others = {k: of[client][0] for k, of in known.items() if k != label and client in of}
            if not others or accuracy > majority or n < _FEWEST_EXAMPLES:
                continue
            better = max(others, key=lambda k: others[k])
            if others[better] - max(accuracy, majority) >= _MARGIN:
                losers.append(AtMajority(*client, accuracy, majority, better, others[better]))
        if losers:
            gains = sorted(losers, key=lambda one: one.accuracy - one.better_accuracy)
            found[label] = tuple(gains)
    return found


def _by_client(entry: Entry, *, by_seed: bool) -> dict[_Client, _Known]:
    values: dict[_Client, list[_Known]] = {}
    for trial in entry.trials:
        selected = select_round(trial, "personal", select_by(entry.run))
        partition = entry.run.partitions[trial.seed]
        if selected is None:
            continue
        test = selected.test
        majority = majority_accuracy(partition, test)
        if majority is None:
            continue
        of_clients = zip(test.clients, test.accuracy, majority, test.num_examples, strict=True)
        for client, accuracy, base, n in of_clients:
            if n and accuracy is not None and base is not None:
                key = (partition.name(client), trial.seed if by_seed else None)
                values.setdefault(key, []).append((accuracy, base, n))
    return {
        key: (mean(a for a, _, _ in of), mean(b for _, b, _ in of), sum(n for *_, n in of))
        for key, of in values.items()
    }
