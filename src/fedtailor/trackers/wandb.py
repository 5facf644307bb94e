"""W&B: a run for each method and seed; with WANDB_MODE=offline on this disk, for `wandb sync`."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import wandb

from .follow import Tracker
from .trial import TrackedTrial, Values

ERRORS = (wandb.Error,)


class WandB(Tracker):
    """A tracker. W&B itself says which rounds a run has; without a connection it can't, and the
    run's files are written anew."""

    def __init__(self, run: Path, project: str | None) -> None:
        self._project = project
        self._run: wandb.Run

    def begin(self, trial: TrackedTrial) -> int:
        name = str(trial.experiment["name"])
        settings = wandb.setup().settings
        if settings.mode in ("offline", "dryrun"):  # the run's files are written anew
            for folder in Path(settings.wandb_dir).glob(f"offline-run-*-{trial.key}"):
                shutil.rmtree(folder)
        quiet = wandb.Settings(
            console="off", silent=True, disable_git=True, disable_code=True, x_disable_stats=True
        )
        self._run = wandb.init(
            project=self._project or name,
            group=name,
            name=trial.name,
            id=trial.key,
            config=trial.config(),
            resume="allow",
            reinit="create_new",
            settings=quiet,
        )
        return self._run.step - 1 if self._run.resumed else 0

    def log(self, number: int, values: Values) -> None:
        self._run.log(values, step=number)

    def end(self, trial: TrackedTrial, result: Mapping[str, float | str] | None) -> None:
        if result is not None:
            self._run.summary.update(dict(result))
        self._run.finish(1 if trial.commit.diverged else 0)
