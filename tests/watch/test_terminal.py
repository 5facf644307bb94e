"""What a terminal shows, at any width and height."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from fedtailor.store.run_directory import locked
from fedtailor.watch.follow import Follower
from fedtailor.watch.state import State
from fedtailor.watch.terminal import View

MakeRun = Callable[..., Path]


def shown(view: View, width: int = 120, height: int = 40) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=False)
    console.print(view)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_and_has_scores(make_run: MakeRun, width: int) -> None:
    out = make_run(done=6)
    (out / "run.log").write_text("first\n2026-11-23 08:36:07+00:00  " + "long " * 60 + "\n")
    with locked(out):
        state = Follower(out).look()
    lines = shown(View(state), width)
    assert max(map(len, lines)) <= width
    (row,) = [line.split() for line in lines if line.startswith(" fedsdg")]
    assert row[-1] == "running"  # whole: columns are left out instead
    if width == 80:
        assert row[:4] == ["fedsdg", "6/8", "73.3", "78.3"]
    else:
        assert row[:6] == ["fedsdg", "0", "6/8", "73.3", "78.3", "4"]
        curve = row[7]
        assert (curve[0], curve[2], len(curve)) == ("▁", "█", 4)
    assert "12 of 16 rounds, about 8 s left" in "".join(lines)
    assert lines[-1].startswith("08:36:07  long ")
    assert lines[-1].endswith("…")


@pytest.mark.slow
def test_a_low_terminal_keeps_the_method_that_runs(make_run: MakeRun) -> None:
    out = make_run(done=6, methods=("fedavg", *(f"m{k}" for k in range(30))))
    state = Follower(out).look()
    trials = [
        replace(trial, state=State.RUNNING if k == 20 else State.WAITING)
        for k, trial in enumerate(state.trials)
    ]
    state = replace(state, trials=tuple(trials))
    lines = shown(View(state, is_last=False), height=30)
    assert len(lines) <= 30
    assert any(line.startswith(" m19") and "running" in line for line in lines)
    assert "and 15 more" in lines
    assert sum(line.startswith(" m") for line in shown(View(state))) == 31  # with "method"
