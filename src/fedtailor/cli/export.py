"""``fedtailor export``: write a model of a finished run for use without this library."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

from ..errors import announce, say
from .options import add_flag, add_trained, add_which


def add(parser: argparse.ArgumentParser) -> None:
    add_trained(parser)
    whose = parser.add_mutually_exclusive_group()
    whose.add_argument("--client", help="a client's name or number; default: the global model")
    add_flag(whose, "--all-clients", "a folder for each client")
    add_which(parser)
    add_flag(parser, "--merge", "one full model instead of an adapter")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")


def command(options: argparse.Namespace) -> None:
    from ..export.folder import all_clients_of, export_trained
    from ..export.scores import ModelScores
    from ..runs.trained import open_trained

    trained = open_trained(options.run, options.method, options.seed, which=options.which)
    clients = all_clients_of(trained) if options.all_clients else [options.client]
    scores = ModelScores.read(trained)
    what = clients if options.all_clients else options.client
    out = export_trained(scores, options.out, what, options.merge)
    print(out)
    if options.client is None and not options.all_clients:
        say("note: this is the global model; --client names a client's own")
    if doubts := scores.doubts(clients):
        announce(doubts)
    if rounding := trained.experiment.model.rounding:
        say(f"note: trained on a base in {rounding}; this is of its unrounded weights")
    say_how_to_try(out)


def say_how_to_try(out: Path) -> None:
    """Name, on stderr, the program that uses an exported model; of several folders the first."""
    if program := next(iter(sorted([*out.glob("use.py"), *out.glob("*/use.py")])), None):
        about = json.loads((program.parent / "export.json").read_text())
        given = "picture.png" if about["modality"] == "image" else "'some text'"
        given = "PAIRS.csv" if about.get("pair") else given
        say(f"try: python {shlex.quote(str(program))} {given}")
