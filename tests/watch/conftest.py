"""Runs to watch: real ones with two small methods, and made-up ones of any state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import fedtailor as ft
from tests.report.conftest import write_run
from tests.runs.conftest import EXPERIMENT
from tests.small import digits, digits_backbone

SPEC = replace(EXPERIMENT, rounds=3, methods={"fedsdg": ft.FedSDG(rank=2), "local": ft.Local()})


def run(out: Path, rounds: int = SPEC.rounds, **more: object) -> Path:
    spec = replace(SPEC, rounds=rounds)
    ft.run(spec, out, data=digits(), backbone=digits_backbone(), **more)  # type: ignore[arg-type]
    return out


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run that has ended."""
    return run(tmp_path_factory.mktemp("runs") / "finished")


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """`write_run` into a folder of the test's own, by default with one seed."""

    def make(folder: str = "run", **fields: object) -> Path:
        return write_run(tmp_path / folder, **{"seeds": (0,), **fields})  # type: ignore[arg-type]

    return make
