"""``fedtailor audit``: say in numbers how much a run's models tell of its data."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

from ..store.format import as_json
from .options import add_json, add_trained, add_which


def add(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` the command's options."""
    add_trained(parser)
    add_which(parser)
    parser.add_argument(
        "--shadows", type=int, default=0, metavar="N",
        help="also train the method N times, on rows dealt anew, for a stronger attack; default: 0",
    )  # fmt: skip
    parser.add_argument(
        "--batches", type=int, default=4, metavar="N",
        help="how many clients' uploads are inverted; default: 4",
    )  # fmt: skip
    parser.add_argument(
        "--batch-size", type=int, default=1, metavar="N", help="rows of such an upload; default: 1"
    )
    parser.add_argument(
        "--steps", type=int, default=300, metavar="N", help="of an inversion; default: 300"
    )
    parser.add_argument(
        "--canaries", type=int, default=400, metavar="N",
        help="for the lower bound of epsilon under [privacy]; default: 400",
    )  # fmt: skip
    parser.add_argument(
        "--minutes", type=float, default=10.0,
        help="after so many nothing new begins; default: 10",
    )  # fmt: skip
    add_json(parser)
    parser.set_defaults(command=_audit)


def _audit(options: argparse.Namespace) -> None:
    from ..audit.audit import Plan, audit
    from ..audit.finding import HEADER
    from ..report.text import TextTable
    from ..runs.trained import open_trained

    names = ("shadows", "batches", "batch_size", "steps", "canaries", "minutes")
    plan = Plan(**{name: getattr(options, name) for name in names})
    trained = open_trained(options.run, options.method, options.seed, which=options.which)
    found = audit(trained, plan, lambda line: print(line, file=sys.stderr))
    if options.json:
        print(as_json([asdict(one) for one in found], 2))
        return
    title = f"{trained.label}, seed {trained.seed}, round {trained.round}"
    numbers = {len(HEADER) - 1, 0, 1, 2}
    print(TextTable(title, HEADER, [one.cells() for one in found], is_text=numbers).text())
