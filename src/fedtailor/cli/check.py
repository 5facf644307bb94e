"""``fedtailor check``: look for damaged files in a run directory."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from .options import add_json


def add(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` the command's options."""
    parser.add_argument("run", type=Path, metavar="RUN")
    add_json(parser, "what was found")
    parser.set_defaults(command=_check)


def _check(options: argparse.Namespace) -> None:
    from ..runs.check import check

    found = check(options.run)
    if options.json:
        print(json.dumps(dataclasses.asdict(found), indent=2))
    else:
        for problem in found.problems:
            print(problem)
        without = f", {found.unchecked} without a checksum" if found.unchecked else ""
        print(f"{options.run}: {found.intact} files intact{without}, {len(found.problems)} damaged")
    if found.problems:
        raise SystemExit(1)
