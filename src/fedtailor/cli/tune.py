"""``fedtailor tune``: search for settings on validation data."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError, say
from ..store.format import as_json
from .options import add_experiment, add_json

if TYPE_CHECKING:
    from ..runs.tune import Outcome


def add(parser: argparse.ArgumentParser) -> None:
    add_experiment(parser)
    what = "a [tune] that goes first: a file, or a built-in grid"
    parser.add_argument("--grid", type=Path, metavar="GRID.toml", help=what)
    parser.add_argument("--out", type=Path, help="where candidates go (default: runs/NAME-tune)")
    add_json(parser, "the candidates")


def command(options: argparse.Namespace) -> None:
    from tabulate import tabulate

    from ..runs.tune import best, load, search

    tuning = load(options.experiment, options.settings, options.grid)
    out = options.out or Path("runs") / f"{tuning.experiment.name}-tune"
    outcomes = []
    for outcome in search(tuning, out):
        outcomes.append(outcome)
        said = outcome.diverged or f"{outcome.metric} {_result(outcome)} on validation"
        say(f"{outcome.label}, candidate {outcome.number + 1}: {said}")
    chosen = [best(outcomes, label) for label in tuning.spaces]
    for label, one in zip(tuning.spaces, chosen, strict=True):
        if one is None:
            say(f"all candidates of {label} diverged: best.toml lacks it")
    if options.json:
        rows = [{**dataclasses.asdict(o), "chosen": o in chosen} for o in outcomes]
        print(as_json(rows, 2))
        return
    table = []
    for outcome in outcomes:
        settings = ", ".join(f"{name} = {_short(v)}" for name, v in outcome.settings.items())
        mark = "chosen" if outcome in chosen else ""
        table.append((outcome.label, settings, _result(outcome), outcome.round, mark))
    header = ("method", "settings", "validation", "round", "")
    align = ("left", "left", "right", "right", "left")
    print(tabulate(table, header, colalign=align, disable_numparse=True))
    if not any(chosen):
        raise InputError("no candidate has a result; lower the learning rates in [tune.space]")
    run = shlex.join(["fedtailor", "run", str(out / "best.toml")])
    print(f"\nthe experiment with the chosen settings: {run}")


def _result(outcome: Outcome) -> str:
    from ..store.metrics import bare, higher_is_better

    if outcome.score is None:
        return "diverged"
    is_minus = not higher_is_better(outcome.metric)
    return bare(outcome.metric, -outcome.score if is_minus else outcome.score)


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
