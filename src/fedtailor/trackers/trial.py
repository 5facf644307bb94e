"""A method with one seed as a tracker's run: its settings, its points by round, its result."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ..report.table import table
from ..store.format import dotted, trial_folder
from ..store.logs import commit_of, read_log
from ..store.metrics import summary
from ..store.read import read, read_environment, read_experiment
from ..store.records import Commit, EvaluationLine, RoundLine, Timing

Values = dict[str, float]
_NONE = Commit(0, 0, False, {"history": 0, "clients": 0, "timings": 0})


@dataclass
class TrackedTrial:
    """One method with one seed in the run directory ``run``, as far as it has been read.

    ``key`` identifies it: another directory has another one, and its copies have the same. After a
    roll-back it is another run of the tracker: most can't remove values.
    """

    run: Path
    experiment: Mapping[str, Any]
    environment: bytes
    label: str
    seed: int
    commit: Commit = _NONE  # as it was when `points` was last called
    _bytes: float = 0.0
    _seconds: float = 0.0

    @property
    def folder(self) -> Path:
        """Its folder in the run directory."""
        return trial_folder(self.run, self.label, self.seed)

    @property
    def name(self) -> str:
        """What the tracker's run is called."""
        back = len(self.commit.rolled_back)
        return f"{self.label}-seed-{self.seed}" + (f"-rolled-back-{back}" if back else "")

    @property
    def key(self) -> str:
        """Twelve letters and digits that the tracker finds the run by."""
        return self._key(self.commit)

    def _key(self, commit: Commit) -> str:
        text = json.dumps([self.label, self.seed, *commit.rolled_back]).encode()
        return blake2b(self.environment + text, digest_size=6).hexdigest()

    def was_rolled_back(self, key: str) -> bool:
        """Whether the trial has gone back since it had this ``key``."""
        return self._key(self._read_commit()) != key

    def _read_commit(self) -> Commit:
        return commit_of(self.folder) or _NONE

    @property
    def has_ended(self) -> bool:
        """Whether no round is left, as far as it has been read."""
        return self.commit.finished or self.commit.diverged is not None

    def config(self) -> dict[str, str | int | float | bool]:
        """The settings, with dotted names: those of the experiment and those of the method."""
        shared = {k: v for k, v in self.experiment.items() if k not in ("methods", "seeds")}
        (method,) = (m for m in self.experiment["methods"] if m["label"] == self.label)
        versions = json.loads(self.environment).get("versions", {})
        whole = dotted({**shared, "seed": self.seed, "method": method, "versions": versions})
        plain = str | int | float | bool
        return {k: v if isinstance(v, plain) else json.dumps(v) for k, v in whole.items()}

    def rewind(self) -> None:
        """Let the next call of `points` begin with the first round."""
        self.commit, self._bytes, self._seconds = _NONE, 0.0, 0.0

    def points(self) -> dict[int, Values]:
        """The values of rounds that have been committed since the last call, by round; those that
        are not numbers are left out. After a roll-back they begin with the first round again."""
        commit = self._read_commit()
        if commit.rolled_back != self.commit.rolled_back:
            self.rewind()
        old, self.commit = self.commit.bytes, commit
        if commit.bytes == old:
            return {}
        points: dict[int, Values] = {}
        for line in read_log(RoundLine, self.folder / "history.jsonl", commit, old):
            points[line.round] = self._of_round(line)
        for timing in read_log(Timing, self.folder / "timings.jsonl", commit, old):
            # a run that goes on from another one is evaluated as round 0, which is not in history
            points.setdefault(timing.round, {}).update(self._of_timing(timing))
        for evaluation in read_log(EvaluationLine, self.folder / "clients.jsonl", commit, old):
            points.setdefault(evaluation.round, {}).update(_of_evaluation(evaluation))
        return {number: _numbers(points[number]) for number in sorted(points)}

    def _of_round(self, line: RoundLine) -> Values:
        self._bytes += line.bytes_down + line.bytes_up
        return {
            "train/loss": math.nan if line.train_loss is None else line.train_loss,
            "train/lr_scale": line.lr_scale,
            "train/clients": len(line.cohort),
            "bytes/down": line.bytes_down,
            "bytes/up": line.bytes_up,
            "bytes/so_far": self._bytes,
            "privacy/epsilon": math.nan if line.epsilon is None else line.epsilon,
        }

    def _of_timing(self, line: Timing) -> Values:
        self._seconds += sum(line.seconds.values())
        peak = math.nan if line.peak_memory_mb is None else line.peak_memory_mb
        by_phase = {f"seconds/{phase}": value for phase, value in line.seconds.items()}
        return {**by_phase, "seconds/so_far": self._seconds, "memory/peak_mb": peak}

    def result(self) -> dict[str, float | str]:
        """The trial's row of the table by ``reported/NAME``: test results at the reported round."""
        run = read(self.run, (self.label, self.seed))
        row = asdict(table([run]).rows[0])
        found: Values = {}
        for model in ("personal_model", "global_model", "novel_clients"):
            of_model = row.pop(model) or {}
            short = model.partition("_")[0]
            for name, value in {**of_model, **of_model.get("metrics", {})}.items():
                if isinstance(value, dict) and "mean" in value:
                    found[f"reported/{short}/{name}"] = value["mean"]
            if of_model:
                found[f"reported/{short}/round"] = of_model["rounds"][0]
        sizes = ("bytes_down", "bytes_up", "trained", "communicated", "private")
        costs = (*sizes, "flops", "seconds", "simulated_seconds", "epsilon")
        found |= {f"reported/{name}": row[name] for name in costs if row[name] is not None}
        return {"reported/state": row["progress"] or "finished", **_numbers(found)}


def trials(run: Path) -> list[TrackedTrial]:
    """Every method and seed of the run directory ``run``, also those that have not begun."""
    experiment = read_experiment(run)
    environment = run / "environment.json"
    content = b"{}"
    if environment.exists():
        read_environment(run)
        content = environment.read_bytes()
    return [
        TrackedTrial(run, experiment, content, method["label"], seed)
        for method in experiment["methods"]
        for seed in experiment["seeds"]
    ]


def _of_evaluation(line: EvaluationLine) -> Values:
    """Means over clients, and the result of the client at the worst tenth."""
    if not any(line.num_examples):
        return {}
    where = f"{line.split}/{line.model}"
    values: Values = {}
    for metric in ("loss", "accuracy", *line.metrics):
        over_clients = summary(line, metric)
        values[f"{where}/{metric}"] = over_clients.mean
        values[f"{where}/{metric}_decile"] = over_clients.bottom_decile
    return values


def _numbers(values: Values) -> Values:
    return {name: float(value) for name, value in values.items() if math.isfinite(value)}
