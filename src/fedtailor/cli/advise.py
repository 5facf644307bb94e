"""``fedtailor advise``: name methods to try for the clients of an experiment."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from ..errors import InputError
from ..store.format import as_json
from .options import add_experiment, add_json, whole


def add(parser: argparse.ArgumentParser) -> None:
    add_experiment(parser, or_run=True)
    parser.add_argument(
        "--probe", type=whole(1), metavar="ROUNDS",
        help="also train the named methods, the file's own, local and fedavg for a few rounds, and "
        "compare them on validation data",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="keep the probe's run there; default: it is deleted"
    )
    add_json(parser)


def command(options: argparse.Namespace) -> None:
    from ..advice.advise import advise
    from ..advice.probe import lines, probe
    from ..runs.run import open_experiment

    experiment, _ = open_experiment(options.experiment, None, options.settings)
    if (options.experiment / "experiment.json").is_file():
        own, _ = open_experiment(options.experiment, None)
        if (own.data, own.split) != (experiment.data, experiment.split):
            raise InputError("a run has its clients: --set data or split of the experiment's file")
    if options.out is not None and options.probe is None:
        raise InputError("--out keeps the run of a probe; give --probe ROUNDS, too")
    advice = advise(experiment, options.experiment)
    if not options.json:
        print("\n".join(advice.lines(str(options.experiment), options.settings)), flush=True)
    best = None
    if options.probe is not None:
        best = probe(advice, experiment, options.probe, options.out)
    if options.json:
        print(as_json(asdict(advice) | {"probe": best and asdict(best)}, 2))
    elif best is not None:
        source, changes = str(options.experiment), options.settings
        print("\n" + "\n".join(lines(advice, best, options.probe, source, changes)))
