"""Checking all files of a run directory against their checksums."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ..errors import InputError
from ..store.client_states import best_path, staged_path
from ..store.committed import (
    PRIVATE_FILE,
    Commit,
    check_states,
    expected_files,
    read_commit,
    refusals_until,
    state_path,
)
from ..store.files import load_tensors, read_json
from ..store.format import (
    REFUSED_FILE,
    check_committed,
    check_format,
    check_tensors,
    check_there,
    checksum,
    combined_checksum,
    committed_bytes,
    damaged,
    has_commit,
)
from ..store.logs import LOGS
from ..store.row_file import RowFile
from ..store.trained_rows import check_trained_rows
from .base_model import MODEL_FILE, check_model, has_files
from .manifest import open_run, read_data_manifest

_READ_AGAIN = (
    *("*.json", "*.safetensors"),
    *("onboarded/[!.]*/*.json", "onboarded/[!.]*/*.safetensors"),
)  # in the folder of a part

Test = tuple[Path, Callable[[], bool]]  # of a file: whether it has a checksum


@dataclass
class Checked:
    """How many files are as they were written, and for each one that is damaged, or lacks what it
    should have, a line that names it. ``notes`` say what could not be checked."""

    intact: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check(out: Path) -> Checked:
    """Check every file of the run directory ``out`` that is ever read again. What a kill has left
    of a round that does not count is none. Raises InputError where ``out`` is no run directory, or
    one of another version of fedtailor."""
    if not (out / "experiment.json").is_file():
        raise InputError(f"{out} is not a run directory: it has no experiment.json")
    _check_format(out)
    found, problems = Checked(), dict[str, None]()
    for path, test in _tests(out):
        try:
            has_checksum = test()
        except InputError as error:
            problems[str(error)] = None
            continue
        found.intact += has_checksum
        if not has_checksum:
            problems[f"{path} has no checksum: it is damaged, or was changed by hand"] = None
    found.problems += problems
    if not (out / MODEL_FILE).exists() and not found.problems and has_files(open_run(out).model):
        found.notes.append(
            f"{out} has no {MODEL_FILE}, as runs of older versions: whether its base model is "
            "still the one that it was trained with can't be checked"
        )
    return found


def _check_format(out: Path) -> None:
    """Check the format of a run directory, if its experiment.json can be read."""
    try:
        experiment = read_json(out / "experiment.json")
    except InputError:  # which `_tests` tells
        return
    check_format(experiment, out)


def _tests(out: Path) -> Iterator[Test]:
    """A test for each file."""
    yield out / "experiment.json", partial(_json, out / "experiment.json")
    yield out / "environment.json", partial(_json, out / "environment.json")
    yield out, lambda: bool(open_run(out))  # the copies of the user's own files
    if (out / MODEL_FILE).exists():
        yield out / MODEL_FILE, lambda: check_model(open_run(out).model, out)
    begun = {folder.name for folder in out.glob("methods/*/seed-*")}
    seeds = begun | {path.stem for path in out.glob("partitions/seed-*.json")}
    for path in (out / "partitions" / f"{seed}.json" for seed in sorted(seeds)):
        yield path, partial(_holdings, path)
        yield from _of_trained_rows(path)
    for folder in sorted(out.glob("methods/*/seed-*")):
        yield from _of_part(folder)


def _of_trained_rows(path: Path) -> Iterator[Test]:
    """Of the hashes of trained rows that belong to the manifest at ``path``."""
    try:
        stated = read_json(path).get("trained")
    except InputError:  # which was said of the manifest
        stated = None
    file = path.with_name(f"{path.stem}-trained.safetensors")
    if stated is not None or file.exists():
        yield file, partial(check_trained_rows, file, stated)


def _of_part(folder: Path) -> Iterator[Test]:
    try:
        if not has_commit(folder):
            return
        commit = read_commit(folder)
    except InputError:  # nothing says which of its files count
        yield folder / "commit.json", partial(_commit, folder)
        return
    yield folder / "commit.json", partial(_commit, folder)
    for log in LOGS:
        path = folder / f"{log}.jsonl"
        yield path, partial(_log, path, commit, log)
    try:
        expected = expected_files(folder, commit)
    except InputError:  # the log that names some of them is damaged, which was said
        expected = {}
    if (folder / REFUSED_FILE).exists():
        yield folder / REFUSED_FILE, partial(_refusals, folder)
    store = folder / PRIVATE_FILE
    there = [path for pattern in _READ_AGAIN for path in folder.glob(pattern)]
    for path in sorted({*expected, *there}):
        if path in {store, best_path(store, commit.best_round)}:
            yield path, partial(_private, path, commit)
        elif path.suffix == ".safetensors" and not _is_left_over(path, expected):
            yield path, partial(_tensors, path, expected.get(path))
        elif path.suffix == ".json" and path.name != "commit.json":
            yield path, partial(_json, path)


def _is_left_over(path: Path, expected: Collection[Path]) -> bool:
    """Whether a kill has left a file of a round that does not count, or `_private` checks it."""
    number = re.fullmatch(r"(?:round|private|diagnostics|confusion)-(\d+)", path.stem)
    return number is not None and path not in expected


def _tensors(path: Path, committed: str | None) -> bool:
    has_checksum = check_tensors(path)
    check_committed({path: committed})
    return has_checksum


def _json(path: Path) -> bool:
    read_json(path)
    return b'"checksum"' in path.read_bytes()


def _commit(folder: Path) -> bool:
    path = folder / "commit.json"
    _check_says_seed(path, read_commit(folder).seed)
    return _json(path)


def _check_says_seed(path: Path, seed: int | None) -> None:
    """Raise InputError where a file does not say its seed."""
    if seed is None:
        raise damaged(path, "it does not say which seed it belongs to")


def _holdings(path: Path) -> bool:
    content = read_data_manifest(path)
    _check_says_seed(path, content.get("seed"))
    stated, file = content.get("holdings"), path.with_suffix(".safetensors")
    check_there(file)
    if stated not in (None, checksum(file.read_bytes())):
        raise damaged(file)
    return stated is not None and _json(path)


def _log(path: Path, commit: Commit, log: str) -> bool:
    stated = commit.checksums.get(log)
    committed_bytes(path, commit.bytes[log], stated)
    return stated is not None


def _refusals(folder: Path) -> bool:
    refusals_until(folder, 0)
    return True  # which has no checksum


def _private(path: Path, commit: Commit) -> bool:
    """Of the clients' private states, or of those as of the best round. Rows that a kill has kept
    from being moved are in a file of their own; what they overwrite may not have been saved."""
    store = path.with_name(PRIVATE_FILE)
    staged, moved = staged_path(store, commit.round), list[int]()
    if staged.exists():
        state = load_tensors(state_path(path.parent, commit.round))
        moved = state["clients"].tolist() if "clients" in state else []
        check_tensors(staged)
    best = best_path(store, commit.best_round)
    is_going_back = path == store and commit.best_round == commit.round and best.exists()
    if is_going_back and (rows := RowFile.open(best).written()):  # not yet in their places
        return check_tensors(path, rows)
    has_checksums = check_tensors(path, moved)
    if moved and path != store:
        return has_checksums
    file = RowFile.open(path)
    total = file.checksums()
    if moved:
        new = RowFile.open(staged)
        total += sum(new.share(client) - file.share(client) for client in moved)
    check_states(path, combined_checksum(total), commit)
    return True
