"""A run that is started again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import fedtailor as ft
from fedtailor.engine.config import CohortConfig, EngineConfig
from tests.forked import contents
from tests.runs.conftest import EXPERIMENT, FOLDER, run
from tests.small import digits, digits_backbone


def same(a: Path, b: Path) -> bool:
    names = ["history.jsonl", "clients.jsonl", "server.safetensors", "private.safetensors"]
    return all((a / FOLDER / n).read_bytes() == (b / FOLDER / n).read_bytes() for n in names)


@pytest.mark.slow
def test_an_unfinished_run_ends_as_if_it_had_never_stopped(
    unfinished: Path, finished: Path
) -> None:
    assert same(run(unfinished), finished)


def test_finished_runs_are_left_alone(finished: Path) -> None:
    (finished / FOLDER / "round-000002.safetensors").touch()  # a kill inside the last clean-up
    before = (finished / FOLDER / "history.jsonl").read_bytes()
    run(finished)
    assert not (finished / FOLDER / "round-000002.safetensors").exists()
    assert (finished / FOLDER / "history.jsonl").read_bytes() == before


@pytest.mark.slow
def test_the_bound_on_norms_goes_on_from_the_rounds_before(tmp_path: Path) -> None:
    """The first round's norms are the largest. A later round by itself would leave a client out."""
    cohort = CohortConfig(norm_factor=1.0)
    chosen = replace(EXPERIMENT, methods={"fedper": ft.FedPer()}, rounds=6, cohort=cohort)

    def go(out: Path, executor: str, stop: int | None = None) -> dict[str, bytes]:
        engine = EngineConfig(executor=executor, processes=2, device="cpu")  # type: ignore[arg-type]
        on_round = lambda done: ft.STOP if done.number == stop else None  # noqa: E731
        options = {"data": digits(), "backbone": digits_backbone(), "on_round": on_round}
        ft.run(replace(chosen, engine=engine), out, **options)  # type: ignore[arg-type]
        return contents(out / "methods")

    whole = go(tmp_path / "whole", "sequential")
    go(tmp_path / "stopped", "processes", stop=2)
    assert go(tmp_path / "stopped", "processes") == whole
    lines = whole["fedper/seed-0/history.jsonl"].splitlines()
    assert [b"without client" in line for line in lines] == [True] + [False] * 5
