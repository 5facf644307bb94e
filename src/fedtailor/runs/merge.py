"""One run directory from several: the trials of a grid that ran on several machines."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Mapping, Sequence
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


_Run = tuple[Path, Mapping[str, Any]]  # its directory and its experiment


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
    opened = [(path, read_experiment(path)) for path in map(Path, runs)]
    _check_same(opened)
    experiment = reduce(united, (content for _, content in opened))
    trials = _all_trials(opened, experiment)
    place.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(f".{place.name}-merging-", place.parent) as stage:
        fresh = stage / "run"
        _copy([path for path, _ in opened], trials, fresh)
        write_json(fresh / "experiment.json", experiment)
        fresh.replace(place)
    return out


def _copy(runs: Sequence[Path], trials: Mapping[tuple[str, int], Path], out: Path) -> None:
    out.mkdir()
    for run in runs:
        shutil.copytree(run / "partitions", out / "partitions", dirs_exist_ok=True)
        for path in [*run.glob("methods/*/*.py"), *run.glob("factory/*"), *run.glob("metrics/*")]:
            copy = out / path.relative_to(run)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
    for (label, seed), folder in trials.items():
        shutil.copytree(folder, trial_folder(out, label, seed), copy_function=copy_sparse)
    shutil.copyfile(runs[0] / "environment.json", out / "environment.json")
    for run in runs:
        if (run / MODEL_FILE).exists():
            shutil.copyfile(run / MODEL_FILE, out / MODEL_FILE)


def _check_same(runs: Sequence[_Run]) -> None:
    for (path, first), (place, other) in combinations(runs, 2):
        differing = differences(first, other, f"in {path}", f"in {place}")
        if (a := first["rounds"]) != (b := other["rounds"]):
            differing.append(f"rounds is {a} in {path} and {b} in {place}")
        if differing:
            raise InputError(f"different experiments can't be merged: {'; '.join(differing)}")
    models = [path / MODEL_FILE for path, _ in runs if (path / MODEL_FILE).exists()]
    for path in models[1:]:
        if not same_models(models[0], path):
            raise InputError(f"runs of different models can't be merged: {models[0]}, {path}")
    manifests: dict[str, Path] = {}
    for run, _ in runs:
        for path in sorted((run / "partitions").glob("seed-*.json")):
            before = manifests.setdefault(path.name, path)
            if not same_data(read_data_manifest(before), read_data_manifest(path)):
                raise InputError(
                    f"runs of different data, splits or clients can't be merged: {before}, {path}"
                )


def _all_trials(runs: Sequence[_Run], experiment: Mapping[str, Any]) -> dict[tuple[str, int], Path]:
    trials: dict[tuple[str, int], Path] = {}
    twice, unfinished, rounds = [], [], experiment["rounds"]
    for path, content in runs:
        for key in ((m["label"], seed) for m in content["methods"] for seed in content["seeds"]):
            if not has_commit(folder := trial_folder(path, *key)):
                continue
            if key in trials:
                twice.append(f"{_title(key)} (in {trials[key].parents[2]} and {path})")
                continue
            trials[key], commit = folder, read_commit(folder)
            if not commit.has_ended(rounds):
                unfinished.append(
                    f"{_title(key)} (round {commit.round} of {rounds} in {path}; to finish "
                    "it, run it there again with the same --part)"
                )
    wanted = [(m["label"], s) for m in experiment["methods"] for s in experiment["seeds"]]
    missing = [_title(key) for key in wanted if key not in trials]
    problems = {"twice": twice, "unfinished": unfinished, "missing": missing}
    if any(problems.values()):
        said = (f"{what}: {', '.join(keys)}" for what, keys in problems.items() if keys)
        raise InputError("; ".join(said))
    return trials


def _title(key: tuple[str, int]) -> str:
    return f"{key[0]} with seed {key[1]}"


def copy_sparse(source: str, target: str) -> str:
    """Copy a file, without room on the disk for what takes none in ``source``: the private states
    of clients that never trained."""
    with naming(Path(target)), Path(source).open("rb") as old, Path(target).open("wb") as new:
        about = os.fstat(old.fileno())
        os.fchmod(new.fileno(), stat.S_IMODE(about.st_mode))  # a secret stays its owner's
        new.truncate(about.st_size)
        for start, end in stored_parts(old.fileno()):
            for place in range(start, end, _CHUNK):
                part = os.pread(old.fileno(), min(_CHUNK, end - place), place)
                os.pwrite(new.fileno(), part, place)
        os.fsync(new.fileno())
    return target
