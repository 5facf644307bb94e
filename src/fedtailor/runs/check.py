"""Checking all files of a run directory against their checksums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ..engine.client_store import staged_path
from ..engine.row_file import RowFile
from ..errors import InputError
from ..run_format import FORMAT, check_tensors, checksum, committed_bytes, damaged
from .directory import (
    LOGS,
    PRIVATE_FILE,
    Commit,
    load_tensors,
    read_commit,
    read_json,
    state_path,
)
from .manifest import open_run

Test = tuple[Path, Callable[[], bool]]  # of a file: whether it has a checksum


@dataclass
class Checked:
    """How many files are as they were written, how many have no checksum (run format 3), and for
    each one that is damaged, or lacks what it should have, a line that names it."""

    intact: int = 0
    unchecked: int = 0
    problems: list[str] = field(default_factory=list)


def check(out: Path) -> Checked:
    """Check every file of the run directory ``out`` that is ever read again. What a kill has left
    of a round that does not count is none.

    Raises:
        InputError: ``out`` is no run directory, or one of another version of fedtailor.
    """
    if not (out / "experiment.json").is_file():
        raise InputError(f"{out} is not a run directory")
    found, problems = Checked(), dict[str, None]()
    for path, test in _tests(out):
        try:
            has_checksum = test()
        except InputError as error:
            problems[str(error)] = None
            continue
        found.intact += has_checksum
        found.unchecked += not has_checksum
        if not has_checksum and _format(out) > 3:
            problems[f"{path} has no checksum: it is damaged, or was changed by hand"] = None
    found.problems += problems
    return found


def _format(out: Path) -> int:
    """The run's format; that of this version where it can't be read."""
    try:
        return int(read_json(out / "experiment.json").get("format", FORMAT))
    except (InputError, ValueError, TypeError, AttributeError):
        return FORMAT


def _tests(out: Path) -> Iterator[Test]:
    """A test for each file."""
    yield out / "experiment.json", partial(_json, out / "experiment.json")
    yield out / "environment.json", partial(_json, out / "environment.json")
    yield out, lambda: bool(open_run(out))  # the copies of the user's own files
    for path in sorted((out / "partitions").glob("seed-*.json")):
        yield path, partial(_holdings, path)
        trained = path.with_name(f"{path.stem}-trained.safetensors")
        if trained.exists():
            yield trained, partial(check_tensors, trained)
    for folder in sorted(out.glob("methods/*/seed-*")):
        if (folder / "commit.json").exists():
            yield from _of_part(folder)


def _of_part(folder: Path) -> Iterator[Test]:
    yield folder / "commit.json", partial(_json, folder / "commit.json")
    try:
        commit = read_commit(folder)
    except InputError:
        return  # nothing says which of its files count
    for log in LOGS:
        path = folder / f"{log}.jsonl"
        yield path, partial(_log, path, commit, log)
    earlier = {about.round for about in commit.best.values()} - {commit.round}
    # no file has the state before the first round, where the run began with it
    earlier |= {number for number in commit.in_flight if number or state_path(folder, 0).exists()}
    for path in (state_path(folder, number) for number in sorted(earlier)):
        yield path, partial(check_tensors, path)
    if commit.finished:
        yield folder / "server.safetensors", partial(check_tensors, folder / "server.safetensors")
    elif commit.round or state_path(folder, 0).exists():
        path = state_path(folder, commit.round)
        yield path, partial(check_tensors, path)
    if "private" in commit.checksums or (folder / PRIVATE_FILE).exists():
        yield folder / PRIVATE_FILE, partial(_private, folder, commit)
    for path in sorted(folder.glob("private-best-*.safetensors")):
        yield path, partial(check_tensors, path)
    for pattern in ("diagnostics-*", "confusion-*"):
        for path in sorted(folder.glob(f"{pattern}.safetensors")):
            if int(path.stem.rpartition("-")[2]) <= commit.round:
                yield path, partial(check_tensors, path)
    for path in [*folder.glob("*.json"), *folder.glob("onboarded/[!.]*/*.json")]:
        if path.name != "commit.json":
            yield path, partial(_json, path)
    for path in sorted(folder.glob("onboarded/[!.]*/*.safetensors")):
        yield path, partial(check_tensors, path)


def _json(path: Path) -> bool:
    read_json(path)
    return b'"checksum"' in path.read_bytes()


def _holdings(path: Path) -> bool:
    stated, file = read_json(path).get("holdings"), path.with_suffix(".safetensors")
    if not file.exists():
        raise InputError(f"{file} is missing; restore it from a copy, or run anew")
    if stated not in (None, checksum(file.read_bytes())):
        raise damaged(file)
    return stated is not None and _json(path)


def _log(path: Path, commit: Commit, log: str) -> bool:
    stated = commit.checksums.get(log)
    committed_bytes(path, commit.bytes[log], stated)
    return stated is not None


def _private(folder: Path, commit: Commit) -> bool:
    """Rows that a kill has kept from being moved are in a file of their own."""
    path, expected = folder / PRIVATE_FILE, commit.checksums.get("private")
    staged, moved = staged_path(path, commit.round), list[int]()
    if staged.exists():
        moved = load_tensors(state_path(folder, commit.round))["clients"].tolist()
        check_tensors(staged)
    has_checksums = check_tensors(path, moved)
    if expected is None or not has_checksums:
        return has_checksums
    file = RowFile.open(path)
    combined = file.checksums()
    if staged.exists():
        new = RowFile.open(staged)
        for client in moved:
            combined ^= file.checksum(client) ^ new.checksum(client)
    if f"{combined & (2**64 - 1):016x}" != expected:
        raise damaged(path, f"it does not have the states of round {commit.round}")
    return True
