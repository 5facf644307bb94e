"""From a run directory to its state, again and again: of each file only what is new is read."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Sequence, Set
from pathlib import Path

from ..errors import InputError, one_line
from ..objectives import objective_of
from ..store.format import SHARE_OF_RUN
from ..store.read import read_data_manifest, read_experiment
from ..store.selection import selection_metric
from ..trackers.trial import trials
from .files import Lines, Mark, is_written, mark_of
from .state import RunState, State, TrialState
from .trial import FollowedTrial

_LINES = 50  # of run.log
_TAIL = 16_384  # bytes of run.log that are read at first


class Follower:
    """Follows a run directory, perhaps before it is written, or a deployment's folder."""

    def __init__(self, path: Path) -> None:
        self.is_deployment = (path / "deploy.toml").is_file()
        self.run = path / "run" if self.is_deployment else path
        if not self.is_deployment and not is_written(path):
            read_experiment(path)
        self._begin()
        self._name, self._metric, self._rounds = path.name, "accuracy", 0
        self._has_failed = False

    def _begin(self) -> None:
        self._opened: tuple[Mark | None, ...] = ()
        self._trials: list[FollowedTrial] = []
        self._lines, self._log = Lines(self.run / "run.log", _TAIL), deque[str](maxlen=_LINES)

    def look(self) -> RunState:
        """How the run stands now; InputError where a file is damaged."""
        try:
            state = self._look()
            self._has_failed = False
        except InputError:
            if self._has_failed:
                raise
            self._has_failed = True  # perhaps a new run takes the directory over
            self._begin()
            state = self._state(is_running=True)
        return state

    def is_last(self, state: RunState) -> bool:
        """Whether nothing will follow. A deployment's run may go on later, when sites are back."""
        return state.is_over and not (self.is_deployment and state.state == State.INTERRUPTED)

    def _look(self) -> RunState:
        # first of all: a run that ends before its commits are read counts as ended
        is_running = is_written(self.run)
        names = ("experiment.json", "environment.json", "partitions")
        marks = tuple(mark_of(self.run / name) for name in names)
        if marks != self._opened:
            self._open()
            self._opened = marks
        for trial in self._trials:
            trial.look()
        for line in self._lines.new():  # without a time left, which is the state's to tell
            self._log.append(SHARE_OF_RUN.sub("", one_line(line.decode(errors="replace"))))
        return self._state(is_running=is_running)

    def _open(self) -> None:
        """Begin anew: the run has more methods, seeds or rounds than before, or is another one."""
        self._begin()
        manifests = sorted((self.run / "partitions").glob("seed-*.json"))
        if not (self.run / "experiment.json").is_file() or not manifests:
            return
        experiment, partition = read_experiment(self.run), read_data_manifest(manifests[0])
        self._name, self._rounds = experiment["name"], experiment["rounds"]
        self._metric = selection_metric(experiment, objective_of(partition["task"]))
        names = partition.get("names") or ()
        self._trials = [
            FollowedTrial(trial, self._metric, self._rounds, names) for trial in trials(self.run)
        ]
        self._trials.sort(key=lambda one: experiment["seeds"].index(one.known.seed))  # as they run

    def _state(self, *, is_running: bool) -> RunState:
        # the trial that runs: the one that was written to last, of those that have rounds left
        begun = [one for one in self._trials if one.activity and not one.has_ended]
        last = max(begun, key=lambda one: one.activity, default=None)
        running = last if is_running else None
        states = tuple(
            one.state(is_current=one is running, is_running=is_running) for one in self._trials
        )
        may_run = is_running or (self.is_deployment and not states)
        report = self.run / "report.html"
        return RunState(
            str(self.run),
            self._name,
            _state_of({trial.state for trial in states}, is_running=may_run),
            self._metric,
            sum(trial.round for trial in states),
            sum(trial.round if trial.is_over else trial.rounds for trial in states),
            self._seconds_left(states, running) if is_running else None,
            states,
            tuple(self._log),
            str(report) if report.is_file() else None,
        )

    def _seconds_left(
        self, states: Sequence[TrialState], running: FollowedTrial | None
    ) -> float | None:
        """At each method's own pace, or else the mean pace; None before the first round."""
        seconds, rounds = defaultdict[str, float](float), defaultdict[str, int](int)
        for one in self._trials:
            seconds[one.known.method] += one.known.seconds
            rounds[one.known.method] += one.timed
        if not any(rounds.values()):
            return None
        mean = sum(seconds.values()) / sum(rounds.values())
        pace = {label: seconds[label] / n if n else mean for label, n in rounds.items()}
        left = sum(pace[p.method] * (p.rounds - p.round) for p in states if not p.is_over)
        if running is not None:  # some of this round is over
            spent = max(0.0, time.time() - running.activity / 1e9)
            left -= min(spent, pace[running.known.method])
        return max(0.0, left)


def _state_of(trials: Set[State], *, is_running: bool) -> State:
    if is_running and not trials:
        return State.WAITING
    if is_running and trials & {State.RUNNING, State.WAITING}:
        return State.RUNNING
    order = (State.INTERRUPTED, State.WAITING, State.STOPPED, State.FINISHED, State.DIVERGED)
    first = next((state for state in order if state in trials), State.INTERRUPTED)
    return State.INTERRUPTED if first == State.WAITING else first
