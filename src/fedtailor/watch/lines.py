"""What has changed in a run, line by line, for a pipe or a file."""

from __future__ import annotations

from collections.abc import Iterator

from ..units import fixed, seconds_text
from .state import RunState, State, TrialState


def changes(old: RunState | None, new: RunState) -> Iterator[str]:
    """The lines that lead from one look at a run to the next; ``old`` is None at the first."""
    before = {(p.method, p.seed): p for p in old.trials} if old else {}
    if old is None or old.name != new.name:
        yield f"{new.name}: {new.run}"
    for trial in new.trials:
        yield from _of_trial(before.get((trial.method, trial.seed)), trial, new)
    if old is None or old.state != new.state:
        yield f"{new.name} {new.note}; {new.share}"
        if new.is_over and new.report:
            yield f"report: {new.report}"


def _of_trial(old: TrialState | None, new: TrialState, run: RunState) -> Iterator[str]:
    if old is None and new.state == State.WAITING and not new.round:
        return
    for text in new.lately:
        if old is None or text not in old.lately:
            yield f"{new.title}: {text}"
    if new.round and (old is None or new.round != old.round):
        yield f"{new.title}: round {new.round} of {new.rounds}{_scores(new, run)}; {run.share}"
    if new.state not in (State.RUNNING, State.WAITING, State.FINISHED) and (
        old is None or new.state != old.state
    ):
        reason = f": {new.reason}" if new.reason else ""
        yield f"{new.title}: {new.state} after round {new.round} of {new.rounds}{reason}"


def _scores(trial: TrialState, run: RunState) -> str:
    text = "" if trial.train_loss is None else f", training loss {fixed(trial.train_loss, 3)}"
    if trial.latest is not None and trial.best is not None:
        best = f"best {run.score(trial.best)} after round {trial.best.round}"
        text += f", validation {run.metric} {run.score(trial.latest)} ({best})"
    if trial.epsilon is not None:
        text += f", epsilon {trial.epsilon:.4g}"
    if trial.seconds_a_round is not None:
        text += f", {seconds_text(trial.seconds_a_round)} s a round"
    return text
