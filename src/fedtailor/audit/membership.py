"""Membership inference by a threshold on the loss: rows that a model was trained on have less.

Privacy Risk in Machine Learning: Analyzing the Connection to Overfitting. S. Yeom, I. Giacomelli,
M. Fredrikson, S. Jha. CSF 2018.

Members are training rows of clients that took part by the model's round, the others held-out rows
of the same clients. AUC is the chance that a member has less loss than another row. The rate is the
part of the members that a threshold finds which takes at most 1 % of the other rows for members; of
fewer than 100 other rows it takes none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from .. import random
from ..data.federation import Federation
from ..data.table import Indices
from ..engine.scoring import Scoring
from ..errors import InputError
from ..params import Params, to_device
from ..runs.trained import TrainedMethod
from ..store.read import read
from .finding import Finding, Floats, interval

_MOST = 200  # rows of a client that are members, and as many others
_MOST_CLIENTS = 100
_FALSE = 0.01  # of the other rows


@dataclass(frozen=True)
class Rows:
    """Rows to be told apart, by client: ``rows`` of the data set, and which are members."""

    rows: dict[int, Indices]
    members: dict[int, NDArray[np.bool_]]

    @property
    def is_member(self) -> NDArray[np.bool_]:
        """Of all rows, ``[n]``."""
        return np.concatenate(list(self.members.values()))

    @classmethod
    def of(cls, trained: TrainedMethod, round_: int) -> Rows:
        """The same number of training and held-out rows of each client that has taken part up to a
        round, at most 200; of at most 100 clients. Raises InputError where there are none."""
        federation, seed = trained.federation, trained.seed
        trial = read(trained.run, only=(trained.label, seed)).trials[0]
        clients = sorted({k for line in trial.history if line.round <= round_ for k in line.cohort})
        if len(clients) > _MOST_CLIENTS:
            draws = random.generator(seed, "audit", "clients")
            clients = sorted(draws.choice(clients, _MOST_CLIENTS, replace=False).tolist())
        rows, members = {}, {}
        for client in clients:
            draws = random.generator(seed, "audit", "rows", client)
            trained_on, others = federation.rows(client, "train"), held_out(federation, client)
            count = min(_MOST, len(trained_on), len(others))
            if count == 0:
                continue
            some = [draws.permutation(part)[:count] for part in (trained_on, others)]
            order = draws.permutation(2 * count)  # a model may read the rest of a batch
            rows[client] = np.concatenate(some)[order]
            members[client] = (np.arange(2 * count) < count)[order]
        if not rows:
            raise InputError(
                f"{trained.run}: no client that took part has both training and held-out rows, so "
                "that nothing can be told apart"
            )
        return cls(rows, members)


@dataclass(frozen=True)
class Attacked:
    """A kind of model under attack: the ``states`` that each client predicts with after ``round``,
    and the ``rows`` that are to be told apart."""

    states: Callable[[int], Params]
    round: int
    rows: Rows

    @classmethod
    def of(cls, trained: TrainedMethod) -> dict[str, Attacked]:
        """The clients' own models, and the global one, if there is one, by name."""
        rows = Rows.of(trained, trained.round)
        models = {"personal": cls(trained.client_state, trained.round, rows)}
        if trained.has_global_model:
            state, at = trained.global_state(), trained.global_round
            same = rows if at == trained.round else Rows.of(trained, at)
            models["global"] = cls(lambda client: state, at, same)
        return models


def held_out(federation: Federation, client: int) -> Indices:
    """A client's rows for validation and test."""
    return np.concatenate([federation.rows(client, split) for split in ("validation", "test")])


def confidences(trained: TrainedMethod, rows: Rows, states: Callable[[int], Params]) -> Floats:
    """How sure each client's model is of its rows, ``[n]``: log(p / (1 - p)) of p = exp(-loss), the
    loss being the mean over a row's predictions."""
    scoring = Scoring(trained.method, trained.task, trained.federation)
    size, device, found = trained.experiment.evaluate.batch_size, trained.task.device, []
    for client, some in rows.rows.items():
        sums = scoring.scores(to_device(states(client), device), some, size)
        loss = np.clip(sums[:, 0] / np.maximum(sums[:, 2], 1), 1e-12, 1e12)
        found.append(-loss - np.log(-np.expm1(-loss)))
    return np.concatenate(found)


def auc(members: Floats, others: Floats) -> float:
    """The chance that a member's score is above another row's; a tie is half of it.

    >>> auc(np.array([2.0, 1.0]), np.array([1.0, 0.0]))
    0.875
    """
    ranks = rankdata(np.concatenate([members, others]))[: len(members)].sum()
    most = len(members) * (len(members) + 1) / 2
    return float((ranks - most) / (len(members) * len(others)))


def found_rate(members: Floats, others: Floats) -> float:
    """The part of the members above a threshold that at most 1 % of the others are above.

    >>> found_rate(np.array([2.0, 1.0]), np.array([1.0, 0.0]))
    0.5
    """
    threshold = np.sort(others)[::-1][int(_FALSE * len(others))]
    return float((members > threshold).mean())


def told_apart(
    attack: str, model: str, scores: Floats, is_member: NDArray[np.bool_]
) -> list[Finding]:
    """Both measures of an attack that gives members higher ``scores`` ``[n]``."""
    samples = scores[is_member], scores[~is_member]
    areas, rates = (
        (measure(*samples), *interval(measure, samples, attack, model))
        for measure in (auc, found_rate)
    )
    area = f"of a training and a held-out row it names the right one in {areas[0]:.0%} of cases"
    rate = f"it finds {rates[0]:.1%} of the training rows, with at most 1 % of the others"
    return [
        Finding(attack, model, "AUC", area, *areas, 0.5),
        Finding(attack, model, "rate at 1 %", rate, *rates, _FALSE),
    ]


def by_loss(trained: TrainedMethod, models: dict[str, Attacked]) -> list[Finding]:
    """The attack on each of some ``models``, by name."""
    found = []
    for name, one in models.items():
        scores = confidences(trained, one.rows, one.states)
        found += told_apart("loss", name, scores, one.rows.is_member)
    return found
