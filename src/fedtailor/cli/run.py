"""``fedtailor run``: run an experiment file, or go on with a run directory."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InputError, say
from ..trackers import TRACKERS
from .options import add_experiment, add_flag, add_json
from .track import followed

if TYPE_CHECKING:
    from ..profiling import Trace


def add(parser: argparse.ArgumentParser) -> None:
    add_experiment(parser, or_run=True)
    parser.add_argument("--out", type=Path, help="the run directory (default: runs/NAME)")
    add_flag(parser, "--overwrite", "remove the run in the directory, and start anew")
    what = "run the K-th of N portions of all methods and seeds; fedtailor merge joins them"
    parser.add_argument("--part", metavar="K/N", help=what)
    add_json(parser, "the table")
    what = "trace one round (RUN/trace.json.gz) and print where its time went"
    add_flag(parser, "--profile", what)
    parser.add_argument(
        "--track", choices=TRACKERS, help="let a tracker follow the run (see fedtailor track)"
    )
    what = "print what would run, with estimates of time, bytes and memory; write nothing"
    add_flag(parser, "--dry-run", what)


def command(options: argparse.Namespace) -> None:
    from ..engine.executors.process_group import init_process_group
    from ..profiling import Trace
    from ..report import compare, write
    from ..runs.run import dry_run, open_experiment, run

    flags = {"overwrite": options.overwrite, "part": options.part}
    if options.dry_run:
        start = dry_run(options.experiment, options.out, settings=options.settings, **flags)
        print(start.as_json() if options.json else "\n".join(start.lines()))
        return
    with init_process_group() as group:
        experiment, out = open_experiment(options.experiment, options.out, options.settings)
        trace = Trace(out / "trace.json.gz") if options.profile else None
        tracker = options.track if group is None or group.is_leader else None
        with followed(out, tracker) as on_round:
            run(experiment, out, trace=trace, group=group, on_round=on_round, **flags)
        if group is not None and not group.is_leader:
            return
        if trace and not trace.title:
            raise InputError(f"{out} is finished: no round is left to profile")
    print(compare([out], options.json))
    tell = say if options.json else print
    if trace:
        tell(f"\n{_phases(trace)}")
    tell(f"report: {write([out], out / 'report.html')}")


def _phases(trace: Trace) -> str:
    from tabulate import tabulate

    seconds = trace.seconds()
    total = sum(seconds.values())
    rows = [(k, f"{spent:.3f}", f"{100 * spent / total:.1f}%") for k, spent in seconds.items()]
    table = tabulate([*rows, ("total", f"{total:.3f}", "")], colalign=("left", "right", "right"))
    return f"{trace.title}, in seconds (written to {trace.path}):\n{table}"
