"""``fedtailor onboard``: let a new client join a finished run."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..store.format import as_json
from .options import add_flag, add_json, add_trained, add_which


def add(parser: argparse.ArgumentParser) -> None:
    add_trained(parser)
    parser.add_argument(
        "--data", type=Path, required=True, metavar="FILE", help="the client's rows"
    )
    parser.add_argument("--client", required=True, metavar="NAME", help="the client's new name")
    add_which(parser)
    what = "rounds' worth of local training; default: evaluate.novel_passes"
    parser.add_argument("--passes", type=int, metavar="N", help=what)
    add_flag(parser, "--overwrite", "replace a client that joined under this name")
    add_json(parser, "the result")


def command(options: argparse.Namespace) -> None:
    from dataclasses import asdict

    from ..inference.onboard import onboard

    result = onboard(
        options.run, options.method, options.data, options.client, options.seed,
        which=options.which, passes=options.passes, overwrite=options.overwrite,
    )  # fmt: skip
    print(as_json(asdict(result), 2) if options.json else result)
