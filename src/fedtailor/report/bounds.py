"""Notes on bounds on the norms of uploads that have changed."""

from __future__ import annotations

from collections import defaultdict

from ..store.bounds import BOUNDS, shown
from ..store.read import Run


def notes_on_bounds(run: Run) -> list[str]:
    """Return a note for each of `BOUNDS` that was not the same for all methods and rounds."""
    notes = []
    for name in BOUNDS:
        trials: dict[str, list[str]] = defaultdict(list)  # by the values in turn
        for trial in run.trials:
            values = (line.bounds[name] for line in trial.history if name in line.bounds)
            if turns := ", then ".join(dict.fromkeys(map(shown, values))):
                trials[turns].append(f"{trial.label}, seed {trial.seed}")
        if len(trials) > 1 or any(", then " in turns for turns in trials):
            each = "; ".join(f"{turns} ({'; '.join(of)})" for turns, of in trials.items())
            notes.append(f"Different bounds on updates in {run.path}: cohort.{name} was {each}")
    return notes
