"""Train a few methods for a few rounds, and compare them on validation data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..errors import InputError
from ..results import Best, run
from ..runs.experiment import Experiment, configured_method
from ..temporary_folder import temporary_folder
from .advise import Advice
from .measured import ALONE

_BASELINES = (ALONE, "fedavg")


def probe(advice: Advice, experiment: Experiment, rounds: int, out: Path | None = None) -> Best:
    """Run the methods that ``advice`` names, the experiment's own, training alone and FedAvg, for
    ``rounds`` rounds with the first seed; return the best on validation data, and all scores.

    Args:
        advice: for this experiment.
        experiment: whose data, split, model and budget of a round are taken.
        rounds: each method's.
        out: the run directory; None: it is deleted afterwards.

    Raises:
        InputError: the experiment keeps no validation data, or can't be run.
    """
    if experiment.split.validation == 0:
        raise InputError(
            "a probe compares methods on validation data, and split.validation is 0; set it to a "
            "share of the training examples, e.g. 0.2"
        )
    labels = dict.fromkeys([*advice.methods, *_BASELINES, *experiment.methods])
    short = replace(
        experiment,
        methods={
            label: experiment.methods.get(label)
            or configured_method(label, advice.settings_of(label))
            for label in labels
        },
        rounds=rounds,
        seeds=experiment.seeds[:1],
        evaluate=replace(experiment.evaluate, every=rounds),
    )
    if out is not None:
        return run(short, out).best
    with temporary_folder("fedtailor-probe-") as folder:
        return run(short, folder / "probe").best
