"""``fedtailor layers``: choose which upper layers to train."""

from __future__ import annotations

import argparse
import dataclasses
import json

from ..errors import InputError, say
from ..store.format import as_json
from .options import add_experiment, add_json, whole


def add(parser: argparse.ArgumentParser) -> None:
    add_experiment(parser)
    parser.add_argument("--method", metavar="LABEL", help="default: the first that has layers")
    parser.add_argument("--epochs", type=whole(1), default=5, help="of each trial (default: 5)")
    parser.add_argument(
        "--patience", type=whole(1), default=1, help="trials without a gain before the end"
    )
    add_json(parser, "the trials")


def command(options: argparse.Namespace) -> None:
    from tabulate import tabulate

    from ..runs import experiment as experiments
    from ..runs.layer_search import choose, choose_layers

    experiment = experiments.load(options.experiment, options.settings)
    with_layers = [label for label, m in experiment.methods.items() if hasattr(m, "layers")]
    if options.method is None and not with_layers:
        raise InputError(f"no method of {options.experiment} has a field layers")
    label = options.method or with_layers[0]
    trials = []
    for trial in choose_layers(experiment, label, options.epochs, options.patience):
        trials.append(trial)
        say(f"{trial.layers[0]} and up: {trial.accuracy:.3f}")
    best = choose(trials)
    if options.json:
        rows = [{**dataclasses.asdict(trial), "chosen": trial is best} for trial in trials]
        print(as_json(rows, 2))
        return
    table = [
        (one.layers[0], one.trained, f"{100 * one.accuracy:.1f}", "chosen" if one is best else "")
        for one in trials
    ]
    header, align = ("from", "trained", "accuracy", ""), ("left", "right", "right", "left")
    print(tabulate(table, header, colalign=align, disable_numparse=True))
    print(f"\nlayers = {json.dumps(list(best.layers))}")
