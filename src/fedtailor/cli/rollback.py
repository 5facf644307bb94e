"""``fedtailor rollback``: take methods that have diverged back to their best round."""

from __future__ import annotations

import argparse
from pathlib import Path


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="the run directory")
    parser.add_argument(
        "--method", metavar="LABEL", help="this one alone, also if it has not diverged"
    )
    parser.add_argument("--seed", type=int, help="this seed alone (default: all)")


def command(options: argparse.Namespace) -> None:
    from ..store.rollback import rollback

    for line in rollback(options.run, options.method, options.seed):
        print(line)
    print("the command that began the run goes on from there")
