"""Run an experiment, killed with SIGKILL before its n-th durable step, for every n; then go on.

With a second argument, the run in which that happens adds a round to one that has finished with so
many. A program of its own, so that it can fork before PyTorch has started threads. Prints how many
steps there were; exits with 1 if a resumed run's bytes differ from the undisturbed run's.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fedtailor as ft
from tests.small import digits, digits_backbone

SKIP = {"timings.jsonl", "commit.json", "environment.json", ".lock"}


def run(out: Path, rounds: int) -> None:
    experiment = ft.Experiment(
        methods={"fedsdg": ft.FedSDG(rank=2), "fedavg": ft.FedAvg()},
        rounds=rounds,
        split=ft.SplitConfig(3, "dirichlet", alpha=1.0),
        cohort=ft.CohortConfig(size=2),
        local=ft.LocalConfig(steps=1),
        evaluate=ft.EvaluateConfig(every=2),
    )
    ft.run(experiment, out, dataset=digits(), backbone=digits_backbone())


def contents(out: Path) -> dict[str, bytes]:
    paths = [p for p in out.rglob("*") if p.is_file() and p.name not in SKIP]
    return {str(p.relative_to(out)): p.read_bytes() for p in paths}


def in_child(work: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return os.waitpid(child, 0)[1]


def killed_at(point: int, out: Path, rounds: int) -> None:
    left = point

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **named: Any) -> Any:
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return real(*arguments, **named)

        return step

    for name in ("fsync", "replace", "unlink"):
        setattr(os, name, counted(getattr(os, name)))
    run(out, rounds)


def main(folder: Path, finished: int) -> None:
    rounds = finished + 1 if finished else 2
    assert in_child(lambda: run(folder / "whole", rounds)) == 0
    whole = contents(folder / "whole")
    if finished:
        assert in_child(lambda: run(folder / "finished", finished)) == 0
    point = 0
    while True:
        out = folder / str(point)
        if finished:
            shutil.copytree(folder / "finished", out)
        status = in_child(lambda at=point, to=out: killed_at(at, to, rounds))
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL, point
        assert in_child(lambda to=out: run(to, rounds)) == 0, f"not resumed after step {point}"
        if contents(out) != whole:
            sys.exit(f"killed before step {point}, the run ends with other bytes")
        point += 1
    print(point)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
