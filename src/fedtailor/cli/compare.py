"""``fedtailor compare``: print the table of one or several runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import InputError
from .options import add_flag


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directories")
    form = parser.add_mutually_exclusive_group()
    add_flag(form, "--json", "print it as JSON")
    add_flag(form, "--csv", "print plain numbers as CSV")
    add_flag(form, "--latex", "print the tables as LaTeX, with booktabs")
    parser.add_argument(
        "--metric",
        help="what to show: loss, or what evaluate.metrics names, e.g. macro_f1; the reported "
        "rounds stay the same",
    )
    what = "how far each method is ahead of this one, with paired intervals"
    parser.add_argument("--against", metavar="METHOD", help=what)


def command(options: argparse.Namespace) -> None:
    from ..report.cells import text_tables
    from ..report.comparison import against, compare
    from ..report.flat import to_csv
    from ..report.table import table
    from ..store.read import read_all

    if options.against is not None:
        if options.csv or options.latex:
            raise InputError("--against prints a table or, with --json, JSON")
        print(against(options.runs, options.against, options.json, options.metric))
    elif options.csv:
        print(to_csv(table(read_all(options.runs), options.metric)), end="")
    elif options.latex:
        tables = text_tables(table(read_all(options.runs), options.metric))
        print("\n".join(one.latex() for one in tables), end="")
    else:
        print(compare(options.runs, options.json, options.metric))
