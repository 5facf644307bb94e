"""A run directory that grows, and one that has ended."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fedtailor.trackers.trial import TrackedTrial, Values
from tests.report.conftest import write_run


@pytest.fixture
def grow(tmp_path: Path) -> Callable[[int], Path]:
    """Two methods with one seed up to a round of eight; the later call is of the same run."""

    def to(done: int) -> Path:
        path = tmp_path / "run"
        kept = path / "tensorboard"
        if kept.exists():
            kept.rename(tmp_path / "kept")
        shutil.rmtree(path, ignore_errors=True)
        write_run(path, seeds=(0,), done=done, with_auc=True)
        if (tmp_path / "kept").exists():
            (tmp_path / "kept").rename(kept)
        return path

    return to


def points_of(trial: TrackedTrial) -> dict[int, Values]:
    """Those that trackers get: the made-up run is evaluated before round 1, too."""
    return {number: values for number, values in trial.points().items() if number}
