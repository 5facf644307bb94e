"""``fedtailor compare``: print the table of one or several runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from .options import add_json


def add(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` the command's options."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    add_json(parser)
    parser.add_argument(
        "--metric", help="what to show, e.g. macro_f1 or loss; the reported rounds stay the same"
    )
    parser.set_defaults(command=_compare)


def _compare(options: argparse.Namespace) -> None:
    from ..report import compare

    print(compare(options.runs, options.json, options.metric))
