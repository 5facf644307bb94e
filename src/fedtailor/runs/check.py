"""Checking all files of a run directory against their checksums."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

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
    damaged,
    has_commit,
)
from ..store.logs import LOGS, committed_bytes
from ..store.row_file import RowFile
from ..store.trained_rows import check_trained_rows
from .base_model import MODEL_FILE, check_model, has_files
from .manifest import open_run, read_data_manifest

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
    of a round that does not count is none."""
    if not (out / "experiment.json").is_file():
        raise InputError(f"{out} is not a run directory: it has no experiment.json")
    if (experiment := _read(out / "experiment.json")) is not None:
        check_format(experiment, out)
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


def _tests(out: Path) -> Iterator[Test]:
    yield out / "experiment.json", partial(_json, out / "experiment.json")
    environment = out / "environment.json"  # a run that was killed here writes it anew
    if environment.exists() or any(map(has_commit, out.glob("methods/*/seed-*"))):
        yield environment, partial(_json, environment)
    yield out, lambda: bool(open_run(out))  # the copies of the user's own files
    if (out / MODEL_FILE).exists():
        yield out / MODEL_FILE, lambda: check_model(open_run(out).model, out)
    begun = {folder.name for folder in out.glob("methods/*/seed-*")}
    seeds = begun | {path.stem for path in out.glob("partitions/seed-*.json")}
    for path in (out / "partitions" / f"{seed}.json" for seed in sorted(seeds)):
        yield path, partial(_holdings, path)
        rows, stated = path.with_name(f"{path.stem}-trained.safetensors"), _read(path) or {}
        if stated.get("trained") is not None or rows.exists():
            yield rows, partial(check_trained_rows, rows, stated.get("trained"))
    for folder in sorted(out.glob("methods/*/seed-*")):
        yield from _of_trial(folder)


def _read(path: Path) -> dict[str, Any] | None:
    """The content of a JSON file; None if it can't be read, which a test of it tells."""
    try:
        return read_json(path)
    except InputError:
        return None


def _of_trial(folder: Path) -> Iterator[Test]:
    commit, expected = None, dict[Path, str | None]()
    with suppress(InputError):  # which the tests of the commit and of the logs tell
        if not has_commit(folder):
            return
        commit = read_commit(folder)
        expected = expected_files(folder, commit)
    file = folder / "commit.json"
    yield file, lambda: _json(file, read_commit(folder).seed)
    if commit is None:  # nothing says which of its files count
        return
    for log in LOGS:
        path = folder / f"{log}.jsonl"
        yield path, partial(_log, path, commit)
    if (folder / REFUSED_FILE).exists():
        yield folder / REFUSED_FILE, lambda: refusals_until(folder, 0) == b""  # no checksum
    of_round = re.compile(r"(?:round|private|diagnostics|confusion)-(\d+)").fullmatch
    store = folder / PRIVATE_FILE
    there = [*folder.glob("*"), *folder.glob("onboarded/[!.]*/*")]
    for path in sorted({*expected, *there}):
        if path in {store, best_path(store, commit.best_round)}:
            yield path, partial(_private, path, commit)
        elif path.suffix == ".safetensors" and (path in expected or not of_round(path.stem)):
            # others are of a round that does not count, by a kill, or `_private` checks them
            yield path, partial(_tensors, path, expected.get(path))
        elif path.suffix == ".json" and path.name != "commit.json":
            yield path, partial(_json, path)


def _tensors(path: Path, committed: str | None) -> bool:
    has_checksum = check_tensors(path)
    check_committed({path: committed})
    return has_checksum


def _json(path: Path, seed: int | None = 0) -> bool:
    read_json(path)
    if seed is None:
        raise damaged(path, "it does not say which seed it belongs to")
    return b'"checksum"' in path.read_bytes()


def _holdings(path: Path) -> bool:
    content = read_data_manifest(path)
    has_checksum = _json(path, content.get("seed"))
    stated, file = content.get("holdings"), path.with_suffix(".safetensors")
    check_there(file)
    if stated not in (None, checksum(file.read_bytes())):
        raise damaged(file)
    return stated is not None and has_checksum


def _log(path: Path, commit: Commit) -> bool:
    committed_bytes(path, commit)
    return path.stem in commit.checksums


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
