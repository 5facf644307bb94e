"""``fedtailor merge``: put the parts of a grid that several machines ran together."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import say
from .options import add_json


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories")
    parser.add_argument("--out", type=Path, required=True, help="the new run directory")
    add_json(parser, "the table")


def command(options: argparse.Namespace) -> None:
    from ..report import compare, write
    from ..runs.merge import merge

    out = merge(options.runs, options.out)
    print(compare([out], options.json))
    tell = say if options.json else print
    tell(f"report: {write([out], out / 'report.html')}")
