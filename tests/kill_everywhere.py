"""Run an experiment, killed with SIGKILL before its n-th durable step, for every n; then go on.

``python -m tests.kill_everywhere EXPERIMENT FOLDER EVERY``, with an experiment of `EXPERIMENTS`;
those of `FINISHED` begin with a run that has finished, with fewer rounds or to be rolled back, and
``start-from`` goes on from the states of another run. With 1 it is killed before every step, with 6
before each sixth.

A program of its own, so that it can fork before PyTorch has started threads. Prints how many steps
there were; exits with 1 if a resumed run's bytes differ from the undisturbed run's.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import fedtailor as ft
from fedtailor.engine.faults import FaultConfig, Machine
from fedtailor.optim import Optimiser
from fedtailor.runs.check import check
from fedtailor.store.committed import read_commit
from tests.forked import contents
from tests.small import digits, digits_backbone

STEPS = ("fsync", "replace", "unlink")  # the durable ones, of os
SGD = Optimiser("sgd", lr=0.5)
SMALL = ft.Experiment(
    methods={"fedsdg": ft.FedSDG(rank=2)},
    split=ft.SplitConfig(3, "dirichlet", alpha=1.0),
    cohort=ft.CohortConfig(size=2),
    local=ft.LocalConfig(steps=1),
)
EXPERIMENTS = {
    "two-methods": replace(
        SMALL,
        methods={"fedsdg": ft.FedSDG(rank=2), "fedavg": ft.FedAvg()},
        rounds=2,
        evaluate=ft.EvaluateConfig(every=2),
    ),
    # the best rounds so far are 1, 1, 3, 3, 3; the last two have the same cohort
    "best-rounds": replace(
        SMALL, methods={"fedsdg": ft.FedSDG(rank=2, optimiser=SGD)}, rounds=5, seeds=(1,)
    ),
}
# in the second round clients are in flight with the states of before the first one, and after it
EXPERIMENTS["asynchronous"] = ft.Experiment(
    methods={"fedper": ft.FedPer()},
    rounds=3,
    split=ft.SplitConfig(6),
    local=ft.LocalConfig(steps=1),
    cohort=ft.CohortConfig(size=4, buffer=2),
    faults=FaultConfig(
        drop_after=0.1, machines=(Machine(0.6, 1e6), Machine(0.4, 2e5)), partial=0.5
    ),
)
EXPERIMENTS["more-rounds"] = EXPERIMENTS["best-rounds"]
EXPERIMENTS["start-from"] = replace(EXPERIMENTS["best-rounds"], rounds=2)
EXPERIMENTS["rolled-back"] = EXPERIMENTS["best-rounds"]
FINISHED = {"more-rounds": 3, "rolled-back": 5}  # rounds


def run(experiment: str, out: Path, rounds: int | None = None) -> None:
    chosen = EXPERIMENTS[experiment]
    if experiment == "start-from":
        chosen = replace(chosen, start_from=ft.StartConfig(str(out.parent / "source")))
    if experiment == "rolled-back" and out.exists():
        commit = read_commit(out / "methods/fedsdg/seed-1")
        if commit.finished and not commit.rolled_back:
            ft.rollback(out, "fedsdg")
    ft.run(
        replace(chosen, rounds=rounds or chosen.rounds),
        out,
        data=digits(),
        backbone=digits_backbone(),
    )


def commits(out: Path) -> list[dict[str, Any]]:
    """All that is committed but what depends on the timings."""
    found = [json.loads(path.read_text()) for path in sorted(out.rglob("commit.json"))]
    for commit in found:
        del commit["bytes"]["timings"], commit["checksums"]["timings"], commit["checksum"]
    return found


def in_child(work: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return os.waitpid(child, 0)[1]


def killed_at(point: int, experiment: str, out: Path) -> None:
    left = point

    def step(real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return real(*arguments, **named)

    for name in STEPS:
        setattr(os, name, partial(step, getattr(os, name)))
    run(experiment, out)


def main(experiment: str, folder: Path, every: int) -> None:
    if experiment == "start-from":
        assert in_child(lambda: run("best-rounds", folder / "source", 1)) == 0
    assert in_child(lambda: run(experiment, folder / "whole")) == 0
    if experiment == "rolled-back":  # of which the commit tells
        assert in_child(lambda: run(experiment, folder / "whole")) == 0
    whole = contents(folder / "whole"), commits(folder / "whole")
    if experiment == "best-rounds":
        assert any("private-best-000003" in name for name in whole[0]), whole[1]
    if experiment in FINISHED:
        finished = FINISHED[experiment]
        assert in_child(lambda: run(experiment, folder / "finished", finished)) == 0
    point = 0
    while True:
        out = folder / str(point)
        if experiment in FINISHED:
            shutil.copytree(folder / "finished", out)
        status = in_child(lambda at=point, to=out: killed_at(at, experiment, to))
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL, point
        problems = check(out).problems if (out / "experiment.json").exists() else []
        assert not problems, f"killed at step {point}: {problems}"
        assert in_child(lambda to=out: run(experiment, to)) == 0, f"not resumed at step {point}"
        if (contents(out), commits(out)) != whole:
            sys.exit(f"killed before step {point}, the run ends with other bytes")
        point += every
    print(point)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
