"""Say which trial of each method was the best on validation data.

python -m evidence.rates
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tabulate import tabulate

from evidence.run import Run, lines, planned
from fedtailor.store.metrics import higher_is_better

TUNED = 10  # the seed of all trials; no result has it

Trials = dict[tuple[str, tuple[str, ...], str], dict[tuple[str, ...], Mapping[str, Any]]]


def trials() -> Trials:
    """The lines of the planned trials: by file, settings and method, then by the trial's own."""
    tuned = (line for line in lines() if line["seed"] == TUNED)
    kept = {(li["file"], tuple(li["set"]), li["method"]): li for li in tuned}
    found: Trials = {}
    for run in planned():
        line = kept.get((run.file, run.settings, run.method))
        if run.seed == TUNED and line is not None:
            own = tuple(s for s in run.settings if s.startswith("methods."))
            base = tuple(s for s in run.settings if s not in own)
            found.setdefault((run.file, base, run.method), {})[own] = line
    return found


def validation(line: Mapping[str, Any]) -> float:
    """A trial's score, higher is better: minus a loss or an error. One that diverged has the
    lowest."""
    if "results" not in line:
        return -math.inf
    score: float = line["results"]["personal"]["validation"]
    return score if higher_is_better(line["results"]["metric"]) else -score


def _shown(line: Mapping[str, Any]) -> str:
    """The accuracy in percent, or the perplexity."""
    score = validation(line)
    is_loss = line.get("results", {}).get("metric") == "loss"
    return f"{math.exp(-score) if is_loss else 100 * score:.1f}"


def unfinished() -> list[Run]:
    """Trials that are planned and have no line."""
    there = {(li["file"], tuple(li["set"]), li["method"], li["seed"]) for li in lines()}
    return [
        run
        for run in planned()
        if run.seed == TUNED and (run.file, run.settings, run.method, run.seed) not in there
    ]


def best() -> dict[tuple[str, tuple[str, ...], str], tuple[str, ...]]:
    """The best trial's settings, where all trials are done."""
    open_ = {
        (run.file, tuple(s for s in run.settings if not s.startswith("methods.")), run.method)
        for run in unfinished()
    }
    return {key: best_of(of) for key, of in trials().items() if key not in open_}


def best_of(tried: Mapping[tuple[str, ...], Mapping[str, Any]]) -> tuple[str, ...]:
    """The best trial's settings; of those that are equal to a tenth of a point the first."""
    return max(tried, key=lambda own: round(validation(tried[own]), 3))


def main() -> None:
    """Print all trials."""
    chosen = best()
    rows = [
        [
            file, " ".join(base), method, " ".join(own), _shown(line),
            "best" if chosen.get((file, base, method)) == own else "",
        ]
        for (file, base, method), of in trials().items()
        for own, line in of.items()
    ]  # fmt: skip
    print(tabulate(rows, headers=("file", "set", "method", "trial", "validation", "")))


if __name__ == "__main__":
    main()
