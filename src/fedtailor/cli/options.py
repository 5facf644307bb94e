"""Options that several commands take."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from ..errors import InputError, whole_number


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """What reads an option that takes whole numbers from ``least`` on, up to ``most``."""

    def read(text: str) -> int:
        value = whole_number(text)
        if value is None or value < least or (most is not None and value > most):
            allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"{text!r}: must be a whole number {allowed}")
        return value

    return read


def check_place(out: Path) -> None:
    """Raise InputError where the folder of a file that ``--out`` names is not there."""
    if not out.parent.is_dir():
        raise InputError(f"no folder {out.parent} for --out {out}; make it, or name another file")


def add_experiment(parser: argparse.ArgumentParser, *, or_run: bool = False) -> None:
    """Take an experiment, a file or a built-in one's name, or a run directory as well, and settings
    that change it."""
    what = "a file, or a built-in experiment (fedtailor list experiments)"
    what += ", or a run directory" if or_run else ""
    parser.add_argument("experiment", type=Path, metavar="EXPERIMENT.toml", help=what)
    add_settings(
        parser,
        "change a value, such as methods.fedsdg.lr_gate=0.01, preset=small or 'seeds=[0, 1]'; "
        "repeatable",
    )


def add_settings(parser: argparse.ArgumentParser, what: str) -> None:
    """Take ``--set key=value``, as often as it is given, into ``settings``."""
    parser.add_argument(
        "--set", action="append", default=[], metavar="key=value", dest="settings", help=what
    )


def add_trained(parser: argparse.ArgumentParser) -> None:
    """Take a finished run, a method and a seed."""
    parser.add_argument("run", type=Path, metavar="RUN", help="the run directory")
    what = "the method, by its label in the run; not needed if the run has only one"
    parser.add_argument("--method", metavar="LABEL", help=what)
    parser.add_argument("--seed", type=int, help="default: the run's first")


def add_which(parser: argparse.ArgumentParser) -> None:
    """Take ``--which``, the round whose models are meant."""
    what = "the reported round, the best on validation data (default), or the last one"
    parser.add_argument("--which", choices=("best", "last"), default="best", help=what)


def add_json(parser: argparse.ArgumentParser, what: str = "it") -> None:
    """Take ``--json``."""
    add_flag(parser, "--json", f"print {what} as JSON")


def add_flag(parser: argparse._ActionsContainer, name: str, what: str) -> None:
    """Take an option without a value."""
    parser.add_argument(name, action="store_true", help=what)
