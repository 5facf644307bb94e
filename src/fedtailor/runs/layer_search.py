"""Which layers to train: from the head alone downwards, while that helps on a probe set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from .. import random
from ..data import load_data
from ..data.federation import Federation
from ..data.table import Dataset, Indices, Partition, Shares
from ..engine.config import CohortConfig, Plan
from ..engine.faults import FaultConfig
from ..engine.rounds import rounds
from ..errors import InputError, unknown
from ..layers.parts import units
from ..method import Method
from ..models import load_tokenizer
from ..params import count
from ..task.backbone import Backbone
from ..uploads.attacks import AttackConfig
from .build import backbone_of, federation_of, task_of
from .experiment import Experiment


@dataclass(frozen=True)
class Candidate:
    """A suffix of the model's layers: ``layers`` are its module paths, ``trained`` the scalars that
    are trained, ``accuracy`` that on the probe set after the last epoch."""

    layers: tuple[str, ...]
    trained: int
    accuracy: float


def suffixes(backbone: Backbone) -> list[tuple[str, ...]]:
    """The module paths of the model's upper parts, the smallest first, the whole model last.

    >>> from torch import nn
    >>> suffixes(Backbone(nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))))
    [('2',), ('0', '1', '2')]
    """
    parts = units(backbone.model)
    return [
        tuple(path for unit in parts[at:] for path in unit) for at in reversed(range(len(parts)))
    ]


def try_suffixes(
    method: Method,
    backbone: Backbone,
    dataset: Dataset,
    rows: Indices,
    plan: Plan,
    *,
    seed: int = 0,
    patience: int = 1,
) -> Iterator[Candidate]:
    """Train each suffix on half of ``rows``, best those of nobody, and score it on the other half;
    ``plan.rounds`` are epochs. Begins with the smallest suffix and ends when ``patience`` of them
    in a row were no better than the best before, or at the whole model."""
    if "layers" not in {field.name for field in fields(method)}:
        raise InputError(f"method {method.name!r} has no field layers")
    if dataset.class_numbers is None:
        raise InputError(f"layers are chosen by accuracy, which {dataset.task} does not have")
    if len(rows) < 2:
        raise InputError(f"{len(rows)} examples to choose layers with; at least 2 are needed")
    order = random.generator(seed, "probe").permutation(rows)
    half = len(order) // 2
    train, probe = (Shares.of([np.sort(part)]) for part in (order[:half], order[half:]))
    nothing = Shares.of([np.empty(0, np.int64)])
    federation = Federation(dataset, Partition(train, probe, nothing, "calibration"), seed)
    evaluate = replace(plan.evaluate, every=plan.rounds, clients=None)
    plan = replace(
        plan.in_clear, cohort=CohortConfig(), evaluate=evaluate, faults=FaultConfig(),
        attack=AttackConfig(),
    )  # fmt: skip
    best, worse = -1.0, 0
    for layers in suffixes(backbone):
        chosen = replace(method, layers=layers)  # type: ignore[call-arg]
        task = task_of(plan, chosen, backbone, seed)
        *_, last = rounds(chosen, task, federation, plan)
        scored = next(e for e in last.evaluations if e.split == "validation")
        accuracy = scored.accuracy[0]
        assert accuracy is not None
        trained = count({name: task.state[name] for name in task.trained})
        yield Candidate(layers, trained, accuracy)
        best, worse = (accuracy, 0) if accuracy > best else (best, worse + 1)
        if worse == patience:
            return


def choose(candidates: Sequence[Candidate]) -> Candidate:
    """The best of ``candidates``; of equals the one with the fewest trained scalars."""
    return max(candidates, key=lambda candidate: (candidate.accuracy, -candidate.trained))


def choose_layers(
    experiment: Experiment, label: str, epochs: int, patience: int
) -> Iterator[Candidate]:
    """Try how many of the model's upper layers to train, with the method at ``label`` and the data
    that the clients of the experiment's first seed hold for validation, pooled."""
    if label not in experiment.methods:
        raise unknown("method", label, experiment.methods)
    seed = experiment.seeds[0]
    dataset = load_data(experiment.data, load_tokenizer(experiment.model))
    federation = federation_of(experiment, dataset, seed)
    backbone = backbone_of(experiment, dataset, None, seed)
    rows = federation.partition.validation.rows
    if not len(rows):
        raise InputError("split.validation is 0: there are no examples to choose layers with")
    method, plan = experiment.methods[label], replace(experiment.plan, rounds=epochs)
    yield from try_suffixes(method, backbone, dataset, rows, plan, seed=seed, patience=patience)
