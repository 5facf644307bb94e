"""One method with one seed, read bit by bit while it runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..errors import one_line
from ..report.samples import in_words
from ..store.format import REFUSED_FILE, missing
from ..store.logs import read_refused
from ..store.metrics import Metric, best_round
from ..store.read import read_samples
from ..trackers.trial import TrackedTrial, Values
from .files import Lines, Mark, mark_of
from .state import RoundScore, State, TrialState, thinned

_POINTS = 200  # of a curve; more are thinned out
_LATELY = 5  # refusals that are named


class FollowedTrial:
    """One method with one seed, as far as it has been read. ``metric`` chooses the best round,
    ``rounds`` are the experiment's goal, and ``names`` those of the clients, if they have some."""

    def __init__(
        self, trial: TrackedTrial, metric: Metric, rounds: int, names: Sequence[str]
    ) -> None:
        self.activity = 0  # when something was written there, in nanoseconds; 0: never
        self.timed = 0  # rounds whose seconds are known
        self._trial, self._metric, self._rounds = trial, metric, rounds
        self._mark: Mark | None = None  # of commit.json
        folder = trial.folder
        self._files = (folder, folder / "history.jsonl", folder / "commit.json")
        self._points: dict[int, Values] = {}
        self._names = names
        self._refused = Lines(folder / REFUSED_FILE)
        self._seen: set[tuple[int, int]] = set()  # round and client of each refused result ...
        self._lately: deque[str] = deque(maxlen=_LATELY)  # ... and what is said of the last ones
        self.known = TrialState(trial.label, trial.seed, State.WAITING, 0, rounds)

    @property
    def has_ended(self) -> bool:
        """Whether no round is left."""
        return self._trial.commit.has_ended(self._rounds)

    def look(self) -> None:
        """Read what is new; InputError where a file is damaged, or lost."""
        marks = [mark_of(path) for path in self._files]
        self.activity = max(mark.time if mark else 0 for mark in marks)
        self._read_refused()
        if marks[2] is None and self._mark is not None:
            raise missing(self._files[2])
        if marks[2] != self._mark:
            self._read()
            self._mark = marks[2]

    def _read_refused(self) -> None:
        """Read the clients' results that rounds went on without, which only a deployment has."""
        new = self._refused.new()
        if self._refused.begins_anew:  # after a roll-back there are fewer
            self._seen.clear()
            self._lately.clear()
        for line in new:
            found = read_refused(line, self._refused.path)
            self._seen.add((found.round, found.client))
            named = found.client < len(self._names)
            name = self._names[found.client] if named else found.client
            text = f"round {found.round} without client {name}: {found.reason}"
            self._lately.append(one_line(text))
        self.known = replace(self.known, refused=len(self._seen), lately=tuple(self._lately))

    def _read(self) -> None:
        """Read the rounds that are new; after a roll-back all there are."""
        before = self._trial.commit.rolled_back
        points, commit = self._trial.points(), self._trial.commit
        self._points = points if commit.rolled_back != before else self._points | points
        own, shared = (
            self._curve(f"validation/{model}/{self._metric}") for model in ("personal", "global")
        )
        written, samples = read_samples(self._trial.folder, commit.round, commit.round)
        losses, seconds = self._curve("train/loss"), self._curve("seconds/so_far")
        self.timed, so_far = len(seconds), max(seconds.values(), default=0.0)
        self.known = replace(
            self.known,
            round=commit.round,
            reason=None if commit.diverged is None else one_line(commit.diverged),
            latest=_score(own, max(own, default=0)),
            best=self._best(own),
            latest_global=_score(shared, max(shared, default=0)),
            best_global=self._best(shared),
            train_loss=losses[max(losses)] if losses else None,
            epsilon=max(self._curve("privacy/epsilon").values(), default=None),
            seconds=so_far,
            seconds_a_round=so_far / self.timed if self.timed else None,
            bytes=round(max(self._curve("bytes/so_far").values(), default=0)),
            curve=thinned(tuple(own.items()), _POINTS),
            losses=thinned(tuple(losses.items()), _POINTS),
            samples=in_words(samples, self._names),
            written=written,
        )

    def _curve(self, name: str) -> dict[int, float]:
        return {number: of[name] for number, of in self._points.items() if name in of}

    def state(self, *, is_current: bool, is_running: bool) -> TrialState:
        """The trial's state, given whether it is what runs, and whether anything does."""
        commit, rounds = self._trial.commit, self._rounds
        if commit.diverged is not None:
            state = State.DIVERGED
        elif self.has_ended:
            state = State.FINISHED
        elif is_current:
            state = State.RUNNING
        elif commit.finished and not is_running:  # other trials have got more rounds
            state, rounds = State.FINISHED, commit.rounds
        elif commit.stopped:
            state = State.STOPPED
        else:
            state = State.WAITING if is_running or not self.activity else State.INTERRUPTED
        return replace(self.known, state=state, rounds=rounds)

    def _best(self, scores: Mapping[int, float]) -> RoundScore | None:
        return _score(scores, best_round(scores, self._metric) if scores else 0)


def _score(scores: Mapping[int, float], number: int) -> RoundScore | None:
    return RoundScore(number, scores[number]) if number in scores else None
