"""How a run stands, as its directory says. Scores are means over clients on validation data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ..report.samples import ShownSample
from ..store.metrics import Metric, bare, unit_of
from ..units import in_words


class State(StrEnum):
    """Of a run: waiting (nothing is written yet), running, finished, diverged (every method with
    every seed), stopped (by a callback, or rolled back), interrupted (no process writes, and rounds
    are left). Of a trial: the same, where waiting means that it is not its turn."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    DIVERGED = "diverged"
    STOPPED = "stopped"
    INTERRUPTED = "interrupted"


Points = tuple[tuple[int, float], ...]  # round, value


def thinned(points: Points, most: int) -> Points:
    """Return at most so many points of a curve, evenly thinned out; the last one stays.

    >>> points = thinned(tuple((number, 0.5) for number in range(1, 1002)), 200)
    >>> points[:2], points[-1], len(points)
    (((5, 0.5), (11, 0.5)), (1001, 0.5), 167)
    """
    step = max(1, -(-len(points) // most))
    return points[(len(points) - 1) % step :: step]


@dataclass(frozen=True)
class RoundScore:
    """A mean over clients on validation data, after ``round``."""

    round: int
    value: float


@dataclass(frozen=True)
class TrialState:
    """One method with one seed, up to its last committed round.

    ``latest`` and ``best`` are of the personal models, as is ``curve``; ``losses`` are those of
    training. ``refused`` counts the clients' results that rounds went on without, ``lately`` says
    which were the last ones, and why. ``reason`` says why training diverged.
    """

    method: str
    seed: int
    state: State
    round: int
    rounds: int
    latest: RoundScore | None = None
    best: RoundScore | None = None
    latest_global: RoundScore | None = None
    best_global: RoundScore | None = None
    train_loss: float | None = None
    epsilon: float | None = None  # of privacy that is spent
    seconds: float = 0.0
    seconds_a_round: float | None = None
    bytes: int = 0
    refused: int = 0
    lately: tuple[str, ...] = ()
    reason: str | None = None
    curve: Points = ()
    losses: Points = ()
    samples: tuple[ShownSample, ...] = ()  # what models have written last ...
    written: int = 0  # ... after this round

    @property
    def title(self) -> str:
        """What the trial is called in a log."""
        return f"{self.method}, seed {self.seed}"

    @property
    def is_over(self) -> bool:
        """Whether no round will follow as things are."""
        return self.state in (State.FINISHED, State.DIVERGED, State.STOPPED)


@dataclass(frozen=True)
class RunState:
    """A run. ``metric`` chooses the best rounds; ``round`` counts those of all ``trials``, and
    ``rounds`` is their goal; ``seconds_left`` is an estimate, None if there is none. ``log`` has
    the last lines of run.log; ``report`` is the path of report.html, if it is there."""

    run: str
    name: str
    state: State
    metric: Metric
    round: int
    rounds: int
    seconds_left: float | None
    trials: tuple[TrialState, ...]
    log: tuple[str, ...]
    report: str | None

    @property
    def is_over(self) -> bool:
        """Whether no round will follow as things are."""
        return self.state not in (State.WAITING, State.RUNNING)

    @property
    def measure(self) -> str:
        """The measure of the scores with its unit, such as ``validation accuracy (%)``."""
        return f"validation {self.metric}{unit_of(self.metric)}"

    def score(self, score: RoundScore | None) -> str:
        """A score as text; ``-`` for none."""
        return bare(self.metric, None if score is None else score.value)

    @property
    def share(self) -> str:
        """How much of the run is done."""
        left = "" if self.seconds_left is None else f", about {in_words(self.seconds_left)} left"
        return f"{self.round} of {self.rounds} rounds{left if self.state == State.RUNNING else ''}"

    @property
    def note(self) -> str:
        """The state, as a sentence of which the run's name is the subject."""
        if self.state == State.RUNNING:
            trial = next((one for one in self.trials if one.state == State.RUNNING), None)
            if trial is None:
                return "runs"
            number = min(trial.round + 1, trial.rounds)
            return f"runs {trial.title}, round {number} of {trial.rounds}"
        places = _places(self.trials, self.state)
        return {
            State.INTERRUPTED: f"is interrupted: no process runs it, and rounds are left; {places}",
            State.DIVERGED: f"has diverged with every method; {places}",
            State.WAITING: "has not begun: nothing is written yet",
            State.FINISHED: "has ended",
            State.STOPPED: f"was stopped by a callback, or rolled back; {places}",
        }[self.state]


def _places(trials: Sequence[TrialState], state: State) -> str:
    places = [f"{p.title}: after round {p.round} of {p.rounds}" for p in trials if p.state == state]
    more = f" and {len(places) - 3} more" if len(places) > 3 else ""
    return "; ".join(places[:3]) + more if places else "the next method has not begun"
