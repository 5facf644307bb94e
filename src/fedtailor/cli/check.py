"""``fedtailor check``: look for damaged files in a run directory."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from .options import add_json


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="the run directory")
    add_json(parser, "what was found")


def command(options: argparse.Namespace) -> None:
    from ..runs.check import check

    found = check(options.run)
    if options.json:
        print(json.dumps(dataclasses.asdict(found), indent=2))
    else:
        for line in (*found.problems, *found.notes):
            print(line)
        print(f"{options.run}: {found.intact} files intact, {len(found.problems)} damaged")
        if found.problems and (again := _again(options.run, found.problems)):
            print(f"without a copy, these commands train the damaged methods again:\n{again}")
    if found.problems:
        raise SystemExit(1)


def _again(run: Path, problems: Sequence[str]) -> str:
    """The commands that train damaged methods with their seeds anew; empty if other files are
    damaged, too."""
    place = re.compile(re.escape(f"{run / 'methods'}/") + r"([^/]+/seed-\d+)/(?!onboarded/)")
    found = [place.search(problem) for problem in problems]
    folders = [run / "methods" / one[1] for one in found if one]
    if None in found:
        return ""
    names = [str(folder) for folder in dict.fromkeys(folders)]
    commands = ["rm", "-r", *names], ["fedtailor", "run", str(run)]
    lines = [f"    {shlex.join(command)}" for command in commands]
    if any((folder / "onboarded").is_dir() for folder in folders):
        lines.append("clients that joined there have to join again")
    return "\n".join(lines)
