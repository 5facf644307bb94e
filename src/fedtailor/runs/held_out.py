"""Held-out rows that the models of ``start_from`` were trained on: they are left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..data.federation import Federation
from ..data.omissions import Omission
from ..data.partition import without_held_out
from ..data.table import Fingerprints
from ..store.trained_rows import has_too_many, read_trained_before, read_trained_rows
from .build import Inputs
from .experiment import Experiment, StartConfig
from .manifest import read_experiment

Before = Mapping[int, Fingerprints | None]  # by seed; None: not known


def start_seed(config: StartConfig, seeds: Sequence[int], seed: int) -> int:
    """The one of ``seeds``, those of the old run, that ``seed`` goes on from."""
    if config.seed is not None:
        return config.seed
    return seed if seed in seeds else seeds[0]


def rows_trained_before(experiment: Experiment, out: Path, *, anew: bool = False) -> Before:
    """The rows that the models of ``start_from`` were trained on, ascending, by the seed that goes
    on from them in ``out``. A seed that has begun there needs the old run no more, unless it begins
    ``anew``. Raises InputError where there is no such run."""
    config, before = experiment.start_from, {}
    for seed in experiment.seeds if config.run is not None else ():
        if (out / "partitions" / f"seed-{seed}.json").exists() and not anew:
            before[seed] = read_trained_before(out, seed)
        else:
            run = Path(str(config.run))
            old = start_seed(config, read_experiment(run)["seeds"], seed)
            before[seed] = read_trained_rows(run, old)
    return before


def leave_out(inputs: Inputs, before: Before) -> Inputs:
    """The inputs without the held-out rows that the models were trained on ``before``."""
    run = str(inputs.experiment.start_from.run)
    federations = {
        seed: without_trained(federation, before[seed], run) if seed in before else federation
        for seed, federation in inputs.federations.items()
    }
    return replace(inputs, federations=federations)


def without_trained(federation: Federation, trained: Fingerprints | None, run: str) -> Federation:
    """The federation without its held-out rows that are among those that ``run`` ``trained`` on; an
    omission says how many, or that it is not known."""
    parts, dataset = federation.partition, federation.dataset
    if trained is None or has_too_many(federation):
        why = (
            "it does not say which they are" if trained is None else "there are too many to compare"
        )
        text = f"whether held-out rows were training rows of {run} can't be checked: {why}"
        parts = replace(parts, omissions=(*parts.omissions, Omission("not-checked", 0, text)))
    else:
        held_out = np.concatenate([parts.validation.rows, parts.test.rows])
        is_trained = np.zeros(len(dataset.inputs), bool)
        is_trained[held_out] = np.isin(dataset.fingerprints(held_out), trained)
        parts = without_held_out(parts, is_trained, f"were training rows of {run}, left out")
    return replace(federation, partition=parts, trained_before=trained)
