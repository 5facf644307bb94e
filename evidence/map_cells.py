"""The settings of the map that have results, and what each method came to there."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from evidence.run import CROSS, MANIFESTS, MAP, Run, has_ends, lines, planned
from fedtailor.data.sources import BUILTIN
from fedtailor.method import Method
from fedtailor.methods import METHODS
from fedtailor.store.format import dotted
from fedtailor.store.metrics import higher_is_better, summarise

from .paired import Paired, paired

FILE = "map.toml"
TASKS: Mapping[str, float] = {
    "papers/fedhft/pairs.toml": 0.5,  # any answer
    "papers/fedhft/spans.toml": 0.2718,  # a passage drawn at random
    "tweets.toml": 0.2907,  # the mean of a client's training rows
}
"""Other tasks, and the test score without a model."""

ALONE = "local"
_ADAM = ("optimiser.beta1", "optimiser.beta2", "optimiser.eps")  # SGD doesn't use them

# Lines have this rate also where the run had none, and largest_step decided: it did so in all runs.
_UNUSED: Mapping[str, Mapping[str, Any]] = {"fedmerge": {"lr_w": 100.0}}

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Cell:
    """One setting of the map, or of another file: the lines of each method, by seed."""

    settings: tuple[str, ...]
    methods: Mapping[str, Mapping[int, Line]]
    file: str = FILE

    @property
    def one(self) -> Line:
        """Any line: what all of them have in common."""
        return next(iter(self.methods[ALONE].values()))

    @property
    def metric(self) -> str:
        """What its scores are."""
        metric: str = self.one["results"]["metric"]
        return metric

    @property
    def is_language_model(self) -> bool:
        """Its score is the loss a token."""
        return self.metric == "loss"

    def scores(self, label: str, seeds: Sequence[int]) -> list[dict[str, float]]:
        """For each seed, by client the test score, or minus a loss or an error."""
        found = [self.methods[label][seed]["results"]["personal"] for seed in seeds]
        sign = 1 if higher_is_better(self.metric) else -1
        return [
            {str(k): sign * x for k, x in zip(one["clients"], one[self.metric], strict=True)}
            for one in found
        ]

    def seeds(self, *labels: str) -> list[int]:
        """Those that all of these methods have."""
        return sorted(set.intersection(*(set(self.methods[label]) for label in labels)))

    def paired(self, ours: str, theirs: str) -> Paired:
        """How far one method is ahead of another."""
        seeds = self.seeds(ours, theirs)
        return paired(self.scores(ours, seeds), self.scores(theirs, seeds))

    def measured(self) -> dict[str, Any]:
        """What is kept of the cell: its clients, and what each method came to."""
        settings, all_clients = self.one["settings"], [li["clients"] for li in self._all(ALONE)]
        clients = {key: round(mean(c[key] for c in all_clients), 4) for key in all_clients[0]}
        usual = "causal-lm" if self.is_language_model else "classification"
        task = settings["data"].get("task") or usual
        if task != "classification":
            clients |= {"label_overlap": None, "task": task}
        if "pairs" in clients:
            clients["pairs"] = True
        has_no_ends = not all(has_ends(li) for of in self.methods.values() for li in of.values())
        split, data = settings["split"], settings["data"]["name"] or Path(self.file).stem
        best = max(self.methods, key=lambda label: self._mean(label))
        return {
            "data": data,
            "task": task,
            "modality": BUILTIN[data].modality if self.file == FILE else "text",
            "model": settings["model"]["name"],
            "pretrained": settings["model"]["pretrained"],
            "targets": settings["model"]["targets"],
            "alpha": split["alpha"] if split["scheme"] == "dirichlet" else None,
            "rounds": settings["rounds"],
            "settings": list(self.settings),
            "clients": clients,
            "chosen": max(self.methods, key=self._validation),
            **({"has_ends": False} if has_no_ends else {}),
            **self._other_task(),
            "methods": {
                label: self._method(label, best)
                for label in sorted(self.methods, key=lambda label: -self._mean(label))
            },
        }

    def _other_task(self) -> dict[str, Any]:
        if self.file == FILE:
            return {}
        without = TASKS[self.file]
        return {"metric": self.metric, "file": self.file[:-5], "without_model": without}

    def _all(self, label: str) -> list[Line]:
        return [self.methods[label][seed] for seed in self.seeds(label)]

    def _decile(self, label: str) -> float:
        """The client at the worst tenth, the mean over seeds."""
        personal = [line["results"]["personal"] for line in self._all(label)]
        return mean(
            summarise(x["accuracy"], x["num_examples"], higher_is_better=True).bottom_decile
            for x in personal
        )

    def _mean(self, label: str) -> float:
        scores = self.scores(label, self.seeds(label))
        return mean(mean(x for x in seed.values() if x is not None) for seed in scores)

    def _perplexity(self, label: str) -> float:
        """The mean over seeds of what the clients' mean loss a token comes to."""
        by_seed = self.scores(label, self.seeds(label))
        return mean(math.exp(-mean(of.values())) for of in by_seed)

    def _score(self, label: str) -> dict[str, float]:
        """What stands for the method in a table."""
        if self.is_language_model:
            return {"perplexity": _rounded(self._perplexity(label))}
        if self.metric != "accuracy":
            return {"score": _rounded(abs(self._mean(label)))}
        return {"accuracy": _rounded(self._mean(label)), "decile": _rounded(self._decile(label))}

    def _validation(self, label: str) -> float:
        """The higher the better."""
        score: float = mean(li["results"]["personal"]["validation"] for li in self._all(label))
        return score if higher_is_better(self.metric) else -score

    def _method(self, label: str, best: str) -> dict[str, Any]:
        found, seeds = self._all(label), self.seeds(label, ALONE)
        pairs = [
            (ours[k], alone[k])
            for ours, alone in zip(
                self.scores(label, seeds), self.scores(ALONE, seeds), strict=True
            )
            for k in ours.keys() & alone.keys()
            if ours[k] is not None and alone[k] is not None
        ]
        (settings,) = found[0]["settings"]["methods"]
        return {
            "seeds": self.seeds(label),
            "settings": not_defaults(settings),
            **self._score(label),
            "worse_off": _rounded(float(np.mean([ours < alone for ours, alone in pairs]))),
            "over_alone": _interval(self.paired(label, ALONE)),
            "over_best": _interval(self.paired(label, best)),
            "bytes": round(
                mean(li["results"]["bytes_down"] + li["results"]["bytes_up"] for li in found)
            ),
            "cpu_seconds": mean_seconds(found),
        }


def mean_seconds(found: Sequence[Line]) -> float | None:
    """The mean processor time; None if all runs were interrupted, whose seconds are not known."""
    known = [line["cpu_seconds"] for line in found if "resumed" not in line]
    return round(mean(known), 1) if known else None


def not_defaults(settings: Mapping[str, Any]) -> list[str]:
    """A method's settings that are not its defaults, as ``key=value``."""
    defaults = _plain(METHODS[settings["name"]]())
    unused = _UNUSED.get(settings["name"], {})
    is_sgd = settings.get("optimiser", {}).get("name") == "sgd"
    skipped = {"name", "label", *(_ADAM if is_sgd else ())}
    return [
        f"{key}={json.dumps('none' if value is None else value)}"
        for key, value in dotted(settings).items()
        if key not in skipped and value not in (dotted(defaults).get(key), unused.get(key, ...))
    ]


def _plain(method: Method) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(json.dumps(asdict(method)))  # type: ignore[call-overload]
    return content


def _interval(difference: Paired) -> list[float]:
    return [_rounded(x) for x in (difference.difference, difference.low, difference.high)]


def _rounded(value: float) -> float:
    """A fraction with more digits than pages show: 68.854 % is 68.9, and rounded twice 68.8."""
    return round(value, 6)


def planned_settings() -> list[tuple[str, ...]]:
    """The settings of all cells that the manifest plans, in its order."""
    runs = (run for run in planned([MAP]) if run.file == FILE and not _decides_a_rate(run))
    return list(dict.fromkeys(run.settings for run in runs))


def language_models() -> list[Cell]:
    """The cells of the cross table in which language models were measured."""
    return [cell for cell in cells(CROSS) if cell.is_language_model]


def other_tasks() -> list[Cell]:
    """The tasks that have results with all methods, beside texts and pictures with one label."""
    return [cell for file in TASKS for cell in cells(*MANIFESTS, file=file)]


def cells(*manifests: Path, file: str = FILE) -> list[Cell]:
    """The settings of an experiment file that have results, in the order of the manifests; of the
    map's by default.

    Raises:
        ValueError: a method has diverged; its other seeds would make it look better than it is.
    """
    kept = {(li["file"], tuple(li["set"]), li["method"], li["seed"]): li for li in lines()}
    wanted: dict[tuple[str, ...], dict[int, list[Run]]] = {}
    for run in planned(manifests or [MAP]):
        if run.file == file and not _decides_a_rate(run):
            wanted.setdefault(run.settings, {}).setdefault(run.seed, []).append(run)
    found = []
    for settings, by_seed in wanted.items():
        methods: dict[str, dict[int, Line]] = {}
        for seed, runs in by_seed.items():
            ended = {r.method: kept.get((r.file, r.settings, r.method, seed)) for r in runs}
            if all(line is not None for line in ended.values()):  # the same seeds for all methods
                for method, line in ended.items():
                    if line is None or "results" not in line:
                        raise ValueError(f"{method} diverged in {settings} with seed {seed}")
                    methods.setdefault(method, {})[seed] = line
        if ALONE in methods:
            found.append(Cell(settings, methods, file))
    return found


def _decides_a_rate(run: Run) -> bool:
    return any(".lr" in setting for setting in run.settings)
