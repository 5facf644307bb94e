"""``fedtailor audit``: say in numbers how much a run's models tell of its data."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from ..errors import say
from ..store.format import as_json
from .options import add_json, add_trained, add_which

_NUMBERS = (
    ("--shadows", 0, "also train the method N times, on rows dealt anew, for a stronger attack"),
    ("--batches", 4, "how many clients' uploads are inverted"),
    ("--batch-size", 1, "rows of such an upload"),
    ("--steps", 300, "of an inversion"),
    ("--canaries", 400, "for the lower bound of epsilon under [privacy]"),
    ("--minutes", 10.0, "after so many nothing new begins"),
)


def add(parser: argparse.ArgumentParser) -> None:
    add_trained(parser)
    add_which(parser)
    for name, default, what in _NUMBERS:
        says = f"{what}; default: {default}"
        parser.add_argument(name, type=type(default), default=default, metavar="N", help=says)
    add_json(parser)


def command(options: argparse.Namespace) -> None:
    from ..audit.audit import Plan, audit
    from ..audit.finding import HEADER
    from ..report.text import TextTable
    from ..runs.trained import open_trained

    names = [name.strip("-").replace("-", "_") for name, _, _ in _NUMBERS]
    plan = Plan(**{name: getattr(options, name) for name in names})
    trained = open_trained(options.run, options.method, options.seed, which=options.which)
    found = audit(trained, plan, say)
    if options.json:
        print(as_json([asdict(one) for one in found], 2))
        return
    title = f"{trained.label}, seed {trained.seed}, round {trained.round}"
    numbers = {len(HEADER) - 1, 0, 1, 2}
    print(TextTable(title, HEADER, [one.cells() for one in found], is_text=numbers).text())
