"""TensorBoard: event files in ``RUN/tensorboard/METHOD/seed-S``.

A trial's files are written anew each time, so no point stands there twice.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from ..errors import InputError
from ..report.text import markdown
from .follow import Tracker
from .trial import TrackedTrial, Values

ERRORS = (OSError,)
_SUFFIX = ".fedtailor"  # of our files; no others are touched


class TensorBoard(Tracker):
    """A tracker. It writes into the folder ``project``, or into the run directory."""

    def __init__(self, run: Path, project: str | None) -> None:
        self._folder = run / "tensorboard" if project is None else Path(project)
        if self._folder.is_file():
            raise InputError(f"--project {project} is a file; with tensorboard it must be a folder")
        self._writer: EventFileWriter
        self._last = 0

    def begin(self, trial: TrackedTrial) -> int:
        folder = self._folder / trial.label / f"seed-{trial.seed}"
        for path in folder.glob(f"events.out.tfevents.*{_SUFFIX}"):
            path.unlink()
        self._writer = EventFileWriter(str(folder), filename_suffix=_SUFFIX)
        config = trial.config()
        rows = "".join(
            f"| {markdown(name)} | {markdown(str(value))} |\n" for name, value in config.items()
        )
        self._add(hparams_pb(config, trial_id=trial.name), 0)
        self._add(text_pb("settings", f"| setting | value |\n|---|---|\n{rows}"), 0)
        return 0

    def log(self, number: int, values: Values) -> None:
        scalars = [Summary.Value(tag=name, simple_value=v) for name, v in values.items()]
        self._add(Summary(value=scalars), number)
        self._last = number

    def end(self, trial: TrackedTrial, result: Mapping[str, float | str] | None) -> None:
        if result is not None:
            numbers = {name: v for name, v in result.items() if not isinstance(v, str)}
            self.log(self._last, numbers)
        self._writer.close()

    def flush(self) -> None:
        self._writer.flush()

    def _add(self, summary: Summary, number: int) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=number, summary=summary))
