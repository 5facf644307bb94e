"""``fedtailor doctor``: check the installation, and say what to do."""

from __future__ import annotations

import argparse
import dataclasses
import json

from .options import add_json


def add(parser: argparse.ArgumentParser) -> None:
    add_json(parser, "what was found")


def command(options: argparse.Namespace) -> None:
    from ..runs.doctor import findings

    found = []
    for finding in findings():
        found.append(finding)
        if not options.json:
            advice = f": {finding.advice}" if finding.advice else ""
            print(f"{finding.status:<9}{finding.text}{advice}", flush=True)
    if options.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in found], indent=2))
    if any(finding.status == "problem" for finding in found):
        raise SystemExit(1)
