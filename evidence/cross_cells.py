"""The cells of the cross table: a data set and a method, with the results of each seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median, stdev
from typing import Any

from evidence.map_cells import mean_seconds
from evidence.rates import TUNED
from evidence.run import Run, has_ends, lines, planned
from fedtailor.store.metrics import Summary, summarise

from .paired import paired

FILE = "map.toml"
SEEDS = (0, 1, 2)
SYSTEMS = ("fedsdg", "fedhft", "pfedgate", "fedsq", "fedmerge")
BASELINES = (
    "local", "fedavg", "fedavg-ft", "ditto", "fedper", "fedrep", "apfl", "ifca", "fedsa-lora",
    "fedalt",
)  # fmt: skip

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Data:
    """A column of the table: a setting of the map."""

    name: str
    settings: tuple[str, ...]
    model: str
    clients: str
    is_text: bool = False  # a language model, measured by its perplexity
    tuned_on: tuple[str, ...] | None = None  # the setting that chose the rates, if another

    @property
    def measure(self) -> str:
        """The name of its scores."""
        return "perplexity" if self.is_text else "accuracy"

    def scaled(self, score: float) -> float:
        """Accuracy in percent, or the perplexity of a loss."""
        return math.exp(score) if self.is_text else 100 * score


_DIRICHLET = "20 clients, Dirichlet 0.3"
DATA = (
    Data("Fashion-MNIST", ("preset=images",), "a two-layer CNN", _DIRICHLET),
    Data("Reuters R8", ("preset=reuters",), "MiniLM", _DIRICHLET, tuned_on=()),
    Data("20 Newsgroups", (), "MiniLM", _DIRICHLET),
    Data("Chat messages", ("preset=chat",), "SmolLM2-135M", "8 senders", is_text=True),
)

_ONE_LINEAR = (
    'not planned, as LoRA here adapts linear layers: `model.targets=["hidden"]` adapts the one '
    "below the head, and leaves the convolutions at their random values"
)
_NO_HEAD = (
    "not planned, as the private part is the task's head by default, and a language model has none"
)
_WHOLE = "not planned, as it trains the whole network, for half an hour a run"
LEFT_OUT: Mapping[tuple[tuple[str, ...], str], str] = {
    **{(("preset=images",), m): _ONE_LINEAR for m in ("fedsdg", "fedhft", "fedsa-lora", "fedalt")},
    **{(("preset=chat",), method): _NO_HEAD for method in ("fedper", "fedrep")},
    (("preset=chat",), "pfedgate"): _WHOLE,
}


@dataclass(frozen=True)
class Cell:
    """What one method came to on one data set: its lines by seed, and its trials."""

    data: Data
    method: str
    lines: Mapping[int, Line]
    trials: tuple[int, int]  # done, of

    @property
    def reason(self) -> str:
        """Why the method is not in the table; empty if it is."""
        return LEFT_OUT.get((self.data.settings, self.method), "")

    @property
    def missing(self) -> str:
        """Why there is no score; empty if there is one."""
        if self.reason:
            return "n/a"
        if not self.lines:
            return "not run"
        return "diverged" if any("results" not in line for line in self.lines.values()) else ""

    @property
    def has_ends(self) -> bool:
        """Whether all its lines are of texts as they are now."""
        return all(map(has_ends, self.lines.values()))

    @property
    def is_complete(self) -> bool:
        """Whether it has all seeds, and its rate is the best of all its trials."""
        return (
            not self.missing
            and len(self.lines) == len(SEEDS)
            and (self.trials[0] == self.trials[1])
        )

    def scores(self) -> list[dict[str, float]]:
        """For each seed the test scores by client, higher is better."""
        sign = -1 if self.data.is_text else 1
        return [
            {str(k): sign * x for k, x in zip(one["clients"], one[self._metric], strict=True)}
            for one in self._personal()
        ]

    def numbers(self) -> dict[str, float | None]:
        """Means over seeds; None where a line lacks one. The seconds leave out runs that were
        interrupted, of which they are not known."""
        runs, scaled = list(self.lines.values()), self.data.scaled
        means = [scaled(summary.mean) for summary in self._summaries()]
        results = [line["results"] for line in runs]
        return {
            "mean": round(mean(means), 6),  # as in the map, where scores have four digits
            "sd_over_seeds": stdev(means) if len(means) > 1 else None,
            "decile": mean(scaled(summary.bottom_decile) for summary in self._summaries()),
            "bytes_client_round": mean(one["bytes_down"] + one["bytes_up"] for one in results),
            "flops": _mean(one.get("flops") for one in results),
            "memory_mb": _median(one.get("memory_mb") for one in results),
            "cpu_seconds": mean_seconds(runs),
        }

    @property
    def _metric(self) -> str:
        return "loss" if self.data.is_text else "accuracy"

    def _personal(self) -> list[Any]:
        return [self.lines[seed]["results"]["personal"] for seed in sorted(self.lines)]

    def _summaries(self) -> list[Summary]:
        higher = not self.data.is_text
        return [
            summarise(one[self._metric], one["num_examples"], higher_is_better=higher)
            for one in self._personal()
        ]


def _mean(values: Any) -> float | None:
    known = list(values)
    return None if None in known else mean(known)


def _median(values: Any) -> float | None:
    known = list(values)
    return None if None in known else median(known)


def cells() -> list[Cell]:
    """All cells, by data set and method."""
    kept = {(li["file"], tuple(li["set"]), li["method"], li["seed"]): li for li in lines()}
    trials = _trials(kept)
    return [
        Cell(
            data,
            method,
            {
                seed: kept[key]
                for seed in SEEDS
                if (key := (FILE, data.settings, method, seed)) in kept
            },
            trials.get((data.settings if data.tuned_on is None else data.tuned_on, method), (0, 0)),
        )
        for data in DATA
        for method in SYSTEMS + BASELINES
    ]


def _trials(kept: Mapping[Any, Line]) -> dict[tuple[tuple[str, ...], str], tuple[int, int]]:
    """For each setting and method, how many of the planned trials are done."""
    found: dict[tuple[tuple[str, ...], str], tuple[int, int]] = {}
    for run in planned():
        if run.file == FILE and run.seed == TUNED:
            key = base(run), run.method
            done, of = found.get(key, (0, 0))
            is_done = (run.file, run.settings, run.method, run.seed) in kept
            found[key] = done + is_done, of + 1
    return found


def base(run: Run) -> tuple[str, ...]:
    """A trial's settings without its own, and without its number of rounds."""
    return tuple(one for one in run.settings if not one.startswith(("methods.", "rounds=")))


def best(of: Sequence[Cell]) -> list[str]:
    """The methods of a data set that are the best or can't be told from it, of those that are
    complete."""
    complete = [cell for cell in of if cell.is_complete]
    if not complete:
        return []
    first = max(complete, key=score_of)
    return [
        cell.method
        for cell in complete
        if cell is first or paired(cell.scores(), first.scores()).high >= 0
    ]


def score_of(cell: Cell) -> float:
    """The mean over clients, then over seeds; the higher the better."""
    return mean(mean(by_client.values()) for by_client in cell.scores())
