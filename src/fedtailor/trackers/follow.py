"""From a run directory to a tracker: once, or again and again while the run goes on."""

from __future__ import annotations

import importlib.util
import os
import select
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Protocol

from ..errors import InputError, unknown
from . import TRACKERS
from .trial import TrackedTrial, Values, trials

_PAUSE = 1.0  # seconds between two looks at the run directory

Wait = Callable[[float], bool | None]  # seconds; True: that was the end


class Tracker(Protocol):
    """What receives the points, one trial after the other. A trial may be begun again."""

    def begin(self, trial: TrackedTrial) -> int:
        """Open the trial's run in the tracker; the last round that is there, 0 if none."""

    def log(self, number: int, values: Values) -> None:
        """Add the values of round ``number``."""

    def end(self, trial: TrackedTrial, result: Mapping[str, float | str] | None) -> None:
        """Close the run; ``result`` if anything was added and the trial has ended or stopped."""

    def flush(self) -> None:
        """Write what has been added, where the tracker doesn't by itself."""
        return


def track(
    run: Path | str,
    to: str,
    project: str | None = None,
    *,
    follow: bool = False,
    wait: Wait | None = None,
) -> int:
    """Give a tracker what the run directory ``run`` has committed and the tracker lacks.

    Args:
        run: the run directory.
        to: the tracker: tensorboard, mlflow, wandb or trackio.
        project: the tracker's project (MLflow: its experiment); None: the experiment's name. With
            TensorBoard the folder of the event files; None: ``tensorboard`` in the run directory.
        follow: go on until every method has ended with every seed.
        wait: waits for some seconds between two looks, or less; True as its result ends following,
            after one more look.

    Returns:
        The number of rounds that were added.

    Raises:
        InputError: no run directory; a tracker that is unknown, not installed, or out of reach.
    """
    run = Path(run)
    check_installed(to)
    every = trials(run)
    module = import_module(f".{to}", __package__)
    try:
        tracker = getattr(module, TRACKERS[to])(run, project)
        return _follow(every, tracker, wait or time.sleep if follow else None)
    except module.ERRORS as error:
        raise InputError(f"{to}: {' '.join(str(error).split())}") from error


def _follow(every: Sequence[TrackedTrial], tracker: Tracker, wait: Wait | None) -> int:
    with closing(_Feed(tracker)) as feed:
        is_over: bool | None = False
        while True:
            for trial in every:
                feed.take(trial)
            if wait is None or is_over or all(trial.has_ended for trial in every):
                return feed.added
            is_over = wait(_PAUSE)


def check_installed(to: str) -> None:
    """Raise InputError if there is no tracker ``to``, or its package is not installed."""
    if to not in TRACKERS:
        raise unknown("tracker", to, TRACKERS)
    if importlib.util.find_spec(to) is None:
        raise InputError(
            f"{to} is not installed; install it with pip install 'fedtailor[track]', or it alone"
        )


class _Feed:
    """Gives a tracker the points of one trial at a time."""

    def __init__(self, tracker: Tracker) -> None:
        self.added = 0  # rounds
        self._tracker = tracker
        self._trial: TrackedTrial | None = None  # the one that is open ...
        self._key = ""  # ... and its key then
        self._last = 0  # the last round that the tracker has of it
        self._is_new = False  # whether anything was added to it

    def take(self, trial: TrackedTrial) -> None:
        had_ended = trial.has_ended
        points = trial.points()
        if points and (self._trial is not trial or self._key != trial.key):
            self.close()
            self._last = self._tracker.begin(trial)
            self._trial, self._key, self._is_new = trial, trial.key, False
            trial.rewind()  # the tracker may begin anew
            points = trial.points()
        new = {number: values for number, values in points.items() if number > self._last}
        for number, values in new.items():
            self._tracker.log(number, values)
            self._last = number
        if new:
            self.added += len(new)
            self._is_new = True
            self._tracker.flush()
        if self._trial is trial and trial.has_ended and not had_ended:
            self.close()

    def close(self) -> None:
        trial, self._trial = self._trial, None
        if trial is not None:
            is_done = trial.has_ended or trial.commit.stopped
            has_result = self._is_new and is_done and not trial.was_rolled_back(self._key)
            self._tracker.end(trial, trial.result() if has_result else None)


def until_closed(seconds: float) -> bool:
    """Wait, at most so long, for the end of standard input, and so of who holds it open."""
    readable, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(readable) and not os.read(sys.stdin.fileno(), 1)
