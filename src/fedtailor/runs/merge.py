"""One run directory from several: the trials of a grid that ran on several machines."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import combinations
from pathlib import Path
from typing import Any

from ..errors import InputError, naming
from ..store.committed import read_commit
from ..store.files import write_json
from ..store.format import has_commit, stored_parts, trial_folder
from ..temporary_folder import temporary_folder
from .base_model import MODEL_FILE, same_models
from .extend import differences, united
from .manifest import read_data_manifest, read_experiment, same_data

_CHUNK = 1 << 24  # bytes that are copied at a time


@dataclass(frozen=True)
class _Run:
    path: Path
    experiment: Mapping[str, Any]

    def trials(self) -> Iterator[tuple[tuple[str, int], Path]]:
        for method in self.experiment["methods"]:
            for seed in self.experiment["seeds"]:
                folder = trial_folder(self.path, method["label"], seed)
                if has_commit(folder):
                    yield (method["label"], seed), folder


def merge(runs: Sequence[Path | str], out: Path | str) -> Path:
    """Copy the trials of several run directories into one new directory; returns it.

    The directories are those of one experiment, run with ``part="1/2"`` and ``part="2/2"``, or with
    some of its methods or seeds. The result has the bytes of one machine's run, but for timings and
    the environment, which are those of the machines.

    Args:
        runs: the run directories; they are left as they are.
        out: the new directory, which must not exist, or be empty.

    Raises:
        InputError: there are no ``runs``; the experiments or the data differ; a trial is missing,
            unfinished, or in two directories; ``out`` is not empty, or the working directory.
    """
    out = Path(out)
    if not runs:
        raise InputError("no run directories to merge; name at least one")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"{out} is not an empty directory; choose another --out")
    place = out.resolve()
    if place == Path.cwd():
        raise InputError(f"--out {out} is the working directory; name a new one in it")
    opened = [_Run(path, read_experiment(path)) for path in map(Path, runs)]
    _check_same(opened)
    experiment = reduce(united, (run.experiment for run in opened))
    trials = _all_trials(opened, experiment)
    place.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(f".{place.name}-merging-", place.parent) as stage:
        fresh = stage / "run"
        _copy(opened, trials, fresh)
        write_json(fresh / "experiment.json", experiment)
        fresh.replace(place)
    return out


def _copy(runs: Sequence[_Run], trials: Mapping[tuple[str, int], Path], out: Path) -> None:
    out.mkdir()
    for run in runs:
        shutil.copytree(run.path / "partitions", out / "partitions", dirs_exist_ok=True)
        _copy_own_code(run.path, out)
    for (label, seed), folder in trials.items():
        target = trial_folder(out, label, seed)
        shutil.copytree(folder, target, copy_function=copy_sparse)
    shutil.copyfile(runs[0].path / "environment.json", out / "environment.json")
    for run in runs:
        if (run.path / MODEL_FILE).exists():
            shutil.copyfile(run.path / MODEL_FILE, out / MODEL_FILE)


def _check_same(runs: Sequence[_Run]) -> None:
    for first, other in combinations(runs, 2):
        where = f"in {first.path}", f"in {other.path}"
        differing = differences(first.experiment, other.experiment, *where)
        if (a := first.experiment["rounds"]) != (b := other.experiment["rounds"]):
            differing.append(f"rounds is {a} {where[0]} and {b} {where[1]}")
        if differing:
            raise InputError(f"different experiments can't be merged: {'; '.join(differing)}")
    models = [run.path / MODEL_FILE for run in runs if (run.path / MODEL_FILE).exists()]
    for path in models[1:]:
        if not same_models(models[0], path):
            raise InputError(
                f"runs of different base models can't be merged: {models[0]} and {path} differ"
            )
    manifests: dict[str, Path] = {}
    for run in runs:
        for path in sorted((run.path / "partitions").glob("seed-*.json")):
            before = manifests.setdefault(path.name, path)
            if not same_data(read_data_manifest(before), read_data_manifest(path)):
                raise InputError(
                    f"runs of different data, or of other splits or names of clients, can't be "
                    f"merged: {before} and {path} differ"
                )


def _all_trials(runs: Sequence[_Run], experiment: Mapping[str, Any]) -> dict[tuple[str, int], Path]:
    trials: dict[tuple[str, int], Path] = {}
    twice, unfinished, rounds = [], [], experiment["rounds"]
    for run in runs:
        for key, folder in run.trials():
            if key in trials:
                twice.append(f"{_title(key)} (in {trials[key].parents[2]} and {run.path})")
                continue
            trials[key], commit = folder, read_commit(folder)
            if not commit.has_ended(rounds):
                unfinished.append(
                    f"{_title(key)} (round {commit.round} of {rounds} in {run.path}; to finish "
                    "it, run it there again with the same --part)"
                )
    wanted = [(m["label"], s) for m in experiment["methods"] for s in experiment["seeds"]]
    missing = [_title(key) for key in wanted if key not in trials]
    problems = {"twice": twice, "unfinished": unfinished, "missing": missing}
    if any(problems.values()):
        raise InputError(
            "; ".join(f"{what}: {', '.join(keys)}" for what, keys in problems.items() if keys)
        )
    return trials


def _copy_own_code(run: Path, out: Path) -> None:
    for path in [*run.glob("methods/*/*.py"), *run.glob("factory/*"), *run.glob("metrics/*")]:
        target = out / path.relative_to(run)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def _title(key: tuple[str, int]) -> str:
    return f"{key[0]} with seed {key[1]}"


def copy_sparse(source: str, target: str) -> str:
    """Copy a file, without room on the disk for what takes none in ``source``: the private states
    of clients that never trained."""
    with naming(Path(target)), Path(source).open("rb") as old, Path(target).open("wb") as new:
        new.truncate(os.fstat(old.fileno()).st_size)
        for start, end in stored_parts(old.fileno()):
            for place in range(start, end, _CHUNK):
                os.pwrite(
                    new.fileno(), os.pread(old.fileno(), min(_CHUNK, end - place), place), place
                )
        os.fsync(new.fileno())
    return target
