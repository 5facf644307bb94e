"""Run directories as frozen dataclasses, up to the last committed round. All that reads raises
InputError where a file is missing or damaged, or not of the run in whose folder it lies."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ..errors import InputError, brief
from ..objectives import objective_of
from ..objectives.objective import Objective
from .checked import checked, read_json, read_record, record
from .format import (
    check_belongs,
    check_committed,
    check_folder_name,
    check_format,
    check_tensors,
    checksum,
    damaged,
    has_commit,
    trial_folder,
    trial_of,
)
from .logs import read_commit, read_log
from .records import (
    SECTIONS,
    Attack,
    Commit,
    Costs,
    DataManifest,
    Environment,
    EvaluationLine,
    ExperimentRecord,
    MethodRecord,
    OmissionRecord,
    Partition,
    RoundLine,
    Sample,
    Timing,
)

_COUNTS = {"train", "validation", "test", "labels", "clusters", "majority", "majority_correct"}
StrPath = str | os.PathLike[str]


@dataclass(frozen=True)
class Trial:
    """One method with one seed."""

    label: str
    method: str
    seed: int
    folder: Path
    commit: Commit
    history: Sequence[RoundLine]
    evaluations: Sequence[EvaluationLine]
    timings: Sequence[Timing]
    costs: Costs | None  # None: training diverged in the first round

    @property
    def progress(self) -> str:
        """``round 12 of 30`` or ``diverged in round 13``; empty for a finished trial."""
        if self.commit.diverged is not None:
            return f"diverged in round {self.commit.round + 1}"
        if self.commit.finished:
            return ""
        stopped = "stopped after " if self.commit.stopped else ""
        return f"{stopped}round {self.commit.round} of {self.commit.rounds}"

    def confusion(self, number: int) -> dict[str, NDArray[Any]]:
        """Read the clients' confusion matrices after round ``number``: ``MODEL/SPLIT`` ``[n,
        classes, classes]``, true class by predicted class, and ``MODEL/clients`` ``[n]``; empty if
        the experiment keeps none."""
        path = self.folder / f"confusion-{number:06d}.safetensors"
        return tensors(path) if path.exists() else {}

    def diagnostics(self) -> list[tuple[int, dict[str, NDArray[Any]]]]:
        """Read the method's diagnostics: (round, tensors by name) for committed rounds."""
        paths = sorted(self.folder.glob("diagnostics-*.safetensors"))
        rounds = ((int(path.stem.removeprefix("diagnostics-")), path) for path in paths)
        return [(number, tensors(path)) for number, path in rounds if number <= self.commit.round]


@dataclass(frozen=True)
class Run:
    """A run directory: the experiment, and the trials that have a committed round."""

    path: Path
    name: str
    experiment: Mapping[str, Any]
    environment: Mapping[str, Any]
    partitions: Mapping[int, Partition]
    trials: Sequence[Trial]

    @property
    def objective(self) -> Objective:
        """The kind of task."""
        return objective_of(next((one.task for one in self.partitions.values()), None))


def tensors(path: Path, *names: str) -> dict[str, NDArray[Any]]:
    """Read the tensors of a safetensors file: those of ``names``, or all if there are none."""
    from safetensors import SafetensorError, safe_open

    check_tensors(path)
    try:
        with safe_open(path, framework="numpy") as file:
            if missing := set(names) - set(file.keys()):
                raise InputError(f"{path} lacks the tensors {', '.join(sorted(missing))}")
            return {name: file.get_tensor(name) for name in names or file.keys()}
    except SafetensorError as error:
        raise damaged(path, str(error)) from None


def read_samples(folder: Path, near: int, until: int) -> tuple[int, list[Sample]]:
    """Read what models of a trial have written after a round up to ``until``, the one closest to
    ``near`` (of two the later one); (0, []) if there is none."""
    paths = {int(path.stem.rpartition("-")[2]): path for path in folder.glob("samples-*.json")}
    numbers = [number for number in paths if number <= until]
    if not numbers:
        return 0, []
    number = min(numbers, key=lambda one: (abs(one - near), -one))
    found = read_json(paths[number]).get("samples", ())
    return number, [record(Sample, one, f"{paths[number]}: a sample") for one in found]


def read_trial(folder: Path, label: str, method: str, seed: int) -> Trial:
    """Read the directory of one method with one seed."""
    commit = read_commit(folder)
    costs = folder / "costs.json"
    timings = read_log(Timing, folder / "timings.jsonl", commit)
    for timing in timings:
        check_committed(timing.files_in(folder))
    history = read_log(RoundLine, folder / "history.jsonl", commit)
    evaluations = read_log(EvaluationLine, folder / "clients.jsonl", commit)
    found = read_record(Costs, costs) if commit.round or costs.exists() else None
    return Trial(label, method, seed, folder, commit, history, evaluations, timings, found)


def read_experiment(run: Path) -> dict[str, Any]:
    """Read the experiment of the run directory ``run``: sections, seeds and a list of methods.

    >>> read_experiment(Path("nowhere"))
    Traceback (most recent call last):
    fedtailor.errors.InputError: no directory 'nowhere'; give one that `fedtailor run` wrote
    """
    if not run.is_dir():
        there = Path("runs") / (run.stem if run.is_file() else run)
        hint = f"did you mean {there}?" if there.is_dir() else "give one that `fedtailor run` wrote"
        raise InputError(f"no directory {str(run)!r}; {hint}")
    path = run / "experiment.json"
    if not path.is_file():
        inside = sorted(one.parent for one in run.glob("*/experiment.json"))
        holds = f"; it holds {', '.join(map(str, inside[:3]))}" if inside else ""
        raise InputError(f"{run} is not a run directory: it has no experiment.json{holds}")
    experiment = read_json(path)
    check_format(experiment, path.parent)
    _check_experiment(experiment, path)
    return experiment


def attack_of(experiment: Mapping[str, Any]) -> Attack:
    """Return the simulated attack of a checked experiment."""
    return record(Attack, experiment.get("attack", {}), "attack")


def _check_experiment(experiment: Mapping[str, Any], path: Path) -> None:
    found = record(ExperimentRecord, experiment, str(path))
    checked(experiment, dict.fromkeys(SECTIONS, dict[str, Any]), str(path))
    for name, hints in SECTIONS.items():
        checked(experiment.get(name, {}), hints, f"{path}: {name}")
    record(Attack, experiment.get("attack", {}), f"{path}: attack")
    labels = [record(MethodRecord, method, f"{path}: a method").label for method in found.methods]
    for label in labels:
        check_folder_name(f"{path}: method label", label)
    for name, values in (("labels", labels), ("seeds", found.seeds)):
        if len(set(values)) < len(values):
            raise InputError(f"{path}: the {name} {brief(values)} must differ")


def read(path: Path, only: tuple[str, int] | None = None) -> Run:
    """Read the run directory at ``path``, without methods and seeds that have not begun; with
    ``only``, one label with one seed."""
    experiment = read_experiment(path)
    trials = [
        read_trial(folder, method["label"], method["name"], seed)
        for method in experiment["methods"]
        for seed in experiment["seeds"]
        if only in (None, (method["label"], seed))
        and has_commit(folder := trial_folder(path, method["label"], seed))
    ]
    if not trials:
        raise InputError(f"{path} has no committed round yet, so there is nothing to show")
    partitions = {seed: _read_partition(path, seed) for seed in sorted({t.seed for t in trials})}
    for trial in trials:
        _check_clients(trial, partitions[trial.seed].clients)
    environment = read_environment(path)
    return Run(path, experiment["name"], experiment, environment, partitions, trials)


def read_environment(run: Path) -> dict[str, Any]:
    """Read what made the run in the directory ``run``."""
    path = run / "environment.json"
    content = read_json(path)
    record(Environment, content, str(path))
    return content


def read_data_manifest(path: Path) -> dict[str, Any]:
    """Read what the data of a run with a seed are; InputError where the file is another seed's."""
    content = read_json(path)
    found = record(DataManifest, content, str(path))
    _, seed = trial_of(path.with_suffix(""))
    check_belongs(path, "seed", found.seed, seed)
    if found.names is not None and len(found.names) != found.clients:
        raise InputError(f"{path} has {len(found.names)} names for {found.clients} clients")
    for omission in found.omissions:
        record(OmissionRecord, omission, f"{path}: an omission")
    return content


def _read_partition(run: Path, seed: int) -> Partition:
    path = run / "partitions" / f"seed-{seed}.json"
    texts = read_data_manifest(path)
    held = path.with_suffix(".safetensors")
    counts = tensors(held)
    found = record(
        Partition, {k: v for k, v in texts.items() if k not in _COUNTS} | counts, str(path)
    )
    if found.holdings not in (None, checksum(held.read_bytes())):
        raise damaged(held)
    K = found.clients
    for name in sorted(_COUNTS & counts.keys()):
        shape = (K, len(found.classes)) if name == "labels" else (K,)
        if counts[name].shape != shape or counts[name].dtype.kind not in "iu":
            raise InputError(
                f"{held}: {name} is {counts[name].dtype} {list(counts[name].shape)}; must be "
                f"whole numbers {list(shape)}"
            )
    return found


def _check_clients(trial: Trial, clients: int) -> None:
    named = {
        ("history", "cohort"): [line.cohort for line in trial.history],
        ("clients", "clients"): [result.clients for result in trial.evaluations],
    }
    for (log, what), lines in named.items():
        for number, found in enumerate(lines, 1):
            if len(set(found)) < len(found) or max(found, default=0) >= clients:
                source = f"{trial.folder / log}.jsonl line {number}: {what} {brief(found)}"
                raise InputError(f"{source}: must differ and be below {clients}")


def read_all(paths: StrPath | Sequence[StrPath]) -> list[Run]:
    """Read the run directories at ``paths``, one or several, which must have the same kind of task.

    >>> read_all([])
    Traceback (most recent call last):
    fedtailor.errors.InputError: no run directory given; give one or more
    """
    folders = [Path(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
    if not folders:
        raise InputError("no run directory given; give one or more")
    for number, path in enumerate(folders):
        if path.resolve() in map(Path.resolve, folders[:number]):
            raise InputError(f"run directory {str(path)!r} is given twice; give each once")
    runs = [read(path) for path in folders]
    if len({run.objective for run in runs}) > 1:
        kinds = ", ".join(f"{run.path}: {run.objective.name}" for run in runs)
        raise InputError(
            f"runs of different tasks have no measure in common ({kinds}); compare each kind by "
            "itself"
        )
    return runs
