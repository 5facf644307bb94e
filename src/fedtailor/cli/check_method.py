"""``fedtailor check-method``: check that a method does what every method must."""

from __future__ import annotations

import argparse
import json

from ..errors import InputError
from .options import add_json, add_settings


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "method", metavar="FILE.py:CLASS", help="or package.module:CLASS, or a name"
    )
    add_settings(parser, "a field of the method, e.g. trainable=lora; repeatable")
    add_json(parser, "the outcomes")


def command(options: argparse.Namespace) -> None:
    import torch

    from ..runs.experiment import configured_method
    from ..testing import outcomes

    torch.set_num_threads(1)  # tensors are small, and more threads make it slower
    done = []
    for outcome in outcomes(configured_method(options.method, options.settings)):
        done.append(outcome)
        if not options.json:
            state = f"FAILS: {outcome.problem}" if outcome.problem else "ok"
            print(f"{outcome.subject:<10}{outcome.check}: {state}", flush=True)
    if options.json:
        print(json.dumps([vars(outcome) for outcome in done], indent=2))
    if failed := sum(bool(outcome.problem) for outcome in done):
        raise InputError(f"{options.method} fails {failed} of {len(done)} checks")
