"""What ranks must have in common, and who says what is wrong."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import numpy as np
import pytest

import fedtailor as ft
from fedtailor.engine.executors.process_group import init_process_group
from tests import forked
from tests.forked import FILE, command


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(FILE)
    return path


def test_bad_input_is_said_once(file: Path) -> None:
    said = file.with_suffix(".txt")
    codes = forked.run(3, command(file, "--set", "cohort.sise=3"), said)
    assert codes == [2, 2, 2]
    (line,) = said.read_text().splitlines()
    assert line.startswith("fedtailor: unknown key 'sise' in cohort; did you mean 'size'? fields: ")


def test_what_one_rank_alone_lacks_is_said_by_it(file: Path) -> None:
    """It ends, and so do the others, which have got further."""
    said = file.with_suffix(".txt")

    def work() -> int:
        elsewhere = file.with_name("not here.toml") if os.environ["RANK"] == "1" else file
        return command(elsewhere)()

    assert forked.run(2, work, said) == [2, 2]
    assert said.read_text().splitlines() == [
        f"fedtailor: no experiment file '{file.with_name('not here.toml')}' "
        f"(rank 1 on {socket.gethostname()})"
    ]


def test_all_ranks_must_run_the_same(file: Path) -> None:
    said = file.with_suffix(".txt")

    def work() -> int:
        return command(file, "--set", f"rounds={os.environ['RANK']}7", "--set", "split.seed=4")()

    assert forked.run(2, work, said) == [2, 2]
    assert said.read_text().splitlines() == [
        f"fedtailor: rank 1 on {socket.gethostname()} has another experiment than rank 0; "
        "all ranks must have the same"
    ]
    assert not file.with_suffix("").exists()


def test_only_the_first_rank_calls_back_and_all_of_them_stop(file: Path) -> None:
    """The function of the metric is there on every rank."""
    said = file.with_suffix(".txt")

    def first(labels: np.ndarray, probabilities: np.ndarray) -> float:
        return float(probabilities[:, 0].mean())

    def stop(done: ft.CommittedRound) -> object:
        print(f"called on rank {os.environ['RANK']} after round {done.number}", file=sys.stderr)
        return ft.STOP if done.number == 2 else None

    def work() -> None:
        with init_process_group() as group:
            ft.run(
                ft.load(file), file.with_suffix(""), group=group, metrics={"first": first},
                on_round=stop,  # type: ignore[arg-type]
            )  # fmt: skip

    assert forked.run(2, work, said) == [0, 0], said.read_text()
    calls = [line for line in said.read_text().splitlines() if line.startswith("called")]
    assert calls == [f"called on rank 0 after round {number}" for number in (1, 2)]
    folder = file.with_suffix("") / "methods/fedper/seed-0"
    assert json.loads((folder / "commit.json").read_text())["stopped"]
    assert '"metrics": {"first": [0.' in (folder / "clients.jsonl").read_text()


@pytest.mark.slow
def test_all_ranks_leave_out_what_the_old_run_trained_on(file: Path) -> None:
    """Only the first one reads the old run."""
    said, old = file.with_suffix(".txt"), file.with_name("old")
    assert forked.run(2, command(file, "--out", str(old)), said) == [0, 0], said.read_text()
    other = ("--set", f'start_from="{old}"', "--set", "split.seed=4", "--set", "rounds=1")
    outs = [file.with_name(name) for name in ("two", "one")]
    for ranks, out in zip((2, 1), outs, strict=True):
        work = command(file, *other, "--out", str(out))
        assert forked.run(ranks, work, said) == [0] * ranks, said.read_text()
    assert "held-out rows were training rows of" in said.read_text()
    two, one = map(forked.contents, outs)
    assert two == one
