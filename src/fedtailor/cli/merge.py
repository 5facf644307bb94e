"""``fedtailor merge``: put the parts of a grid that several machines ran together."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

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
    page = write([out], out / "report.html")
    print(f"report: {page}", file=sys.stderr if options.json else sys.stdout)
