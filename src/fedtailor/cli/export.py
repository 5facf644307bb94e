"""``fedtailor export``: write a model of a finished run for use without this library."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from .options import add_trained, add_which


def add(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` the command's options."""
    add_trained(parser)
    parser.add_argument("--client", help="a client's name or number; default: the global model")
    add_which(parser)
    parser.add_argument("--all-clients", action="store_true", help="a folder for each client")
    parser.add_argument("--merge", action="store_true", help="one full model instead of an adapter")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.set_defaults(command=_export)


def _export(options: argparse.Namespace) -> None:
    from ..export.folder import export_model

    out = export_model(
        options.run,
        options.method,
        options.out,
        client=options.client,
        seed=options.seed,
        which=options.which,
        merge=options.merge,
        all_clients=options.all_clients,
    )
    print(out)
    say_how_to_try(out)


def say_how_to_try(out: Path) -> None:
    """Name, on stderr, the program that uses an exported model; of several folders the first."""
    if program := next(iter(sorted([*out.glob("use.py"), *out.glob("*/use.py")])), None):
        print(f"try: python {shlex.quote(str(program))}", file=sys.stderr)
