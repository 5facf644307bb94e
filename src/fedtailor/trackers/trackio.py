"""Trackio: a run for each method and seed, in TRACKIO_DIR or in the Space that it is told."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import trackio
from huggingface_hub.errors import LocalTokenNotFoundError

from .follow import Tracker
from .trial import TrackedTrial, Values

ERRORS = (ValueError, ConnectionError, LocalTokenNotFoundError)


class Trackio(Tracker):
    """A tracker. It finds a run by its name, which therefore ends in the trial's key."""

    def __init__(self, run: Path, project: str | None) -> None:
        self._project = project
        self._run: trackio.Run
        self._last = 0

    def begin(self, trial: TrackedTrial) -> int:
        name = str(trial.experiment["name"])
        self._run = trackio.init(
            project=self._project or name,
            group=name,
            name=f"{trial.name}-{trial.key}",
            config=trial.config(),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self._last = self._run._next_step - 1 if self._run._initial_last_step is not None else 0
        return self._last

    def log(self, number: int, values: Values) -> None:
        self._run.log(dict(values), step=number)
        self._last = number

    def end(self, trial: TrackedTrial, result: Mapping[str, float | str] | None) -> None:
        if result is not None:
            self._run.log(dict(result), step=self._last)
        self._run.finish()
