"""``fedtailor track``: give an experiment tracker what a run has committed."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import say
from ..trackers import TRACKERS
from .options import add_flag

if TYPE_CHECKING:
    from ..runs.callbacks import OnRound


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="the run directory")
    parser.add_argument("--to", required=True, choices=TRACKERS, help="the tracker")
    parser.add_argument(
        "--project",
        help="the tracker's project (default: the experiment's name); with tensorboard the folder "
        "of the event files (default: RUN/tensorboard)",
    )
    add_flag(parser, "--follow", "go on until every method has ended with every seed")
    add_flag(parser, "--until-closed", argparse.SUPPRESS)


def command(options: argparse.Namespace) -> None:
    from ..trackers.follow import track, until_closed

    wait = until_closed if options.until_closed else None
    run, to, follow = options.run, options.to, options.follow
    with redirect_stdout(sys.stderr):  # some trackers print what they do
        added = track(run, to, options.project, follow=follow, wait=wait)
    print(f"{to}: {added} rounds added")


@contextmanager
def followed(out: Path, to: str | None) -> Iterator[OnRound | None]:
    """Let a process of its own follow the run directory ``out``, from the first committed round on,
    until the ``with`` statement has ended and it has seen everything. Yields what `fedtailor.run`
    is to call after each round; None without a tracker."""
    if to is None:
        yield None
        return
    from ..trackers.follow import check_installed

    check_installed(to)
    begun: list[subprocess.Popen[bytes]] = []

    def start(done: object = None) -> None:
        """Start it, once; the pipe tells its end, and an interrupt is for the run alone."""
        if not begun:
            arguments = ["track", str(out), "--to", to, "--follow", "--until-closed"]
            command = [sys.executable, "-m", "fedtailor", *arguments]
            # standard output is for the run's results
            options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": 2}
            begun.append(subprocess.Popen(command, start_new_session=True, **options))

    try:
        yield start
    finally:
        if (out / "experiment.json").is_file():  # what had nothing left to do is seen as a whole
            start()
        for process in begun:
            assert process.stdin is not None
            process.stdin.close()
            if process.wait():
                again = f"fedtailor track {shlex.quote(str(out))} --to {to}"
                say(f"{to} lacks a trial of the run; {again} adds it")
