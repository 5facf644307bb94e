"""``fedtailor doctor``: check the installation, and say what to do."""

from __future__ import annotations

import argparse
import dataclasses
import json

from .options import add_json


def add(parser: argparse.ArgumentParser) -> None:
    add_json(parser, "what was found")


def command(options: argparse.Namespace) -> None:
    from ..runs.doctor import Finding, findings

    def line(found: Finding) -> str:
        advice = f": {found.advice}" if found.advice else ""
        return f"{found.status:<9}{found.text}{advice}"

    found = []
    for finding in findings():
        found.append(finding)
        if not options.json:
            print(line(finding), flush=True)
    if options.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in found], indent=2))
    if any(finding.status == "problem" for finding in found):
        raise SystemExit(1)
