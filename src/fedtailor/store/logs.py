"""The logs of one method with one seed, up to its last committed round."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InputError
from .checked import check_results, load_json, read_json, record, records
from .format import check_belongs, check_there, checksum, damaged, has_commit, trial_of
from .records import BestRound, Commit, EvaluationLine, RefusedResult, RoundLine

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from .checked import Record

LOGS = ("history", "clients", "timings")


def read_log(
    kind: type[Record], path: Path, commit: Commit, skip: Mapping[str, int] | None = None
) -> list[Record]:
    """Read the committed lines of a log, each a ``kind``; ``skip`` has the lengths of the logs that
    have been read before."""
    start = skip[path.stem] if skip else 0
    records = []
    for number, line in enumerate(committed_bytes(path, commit)[start:].splitlines(), start=1):
        source = f"{path} line {number}"
        found = record(kind, load_json(line, source), source)
        _check_lengths(found, source)
        records.append(found)
    return records


def committed_bytes(path: Path, commit: Commit) -> bytes:
    """Return the bytes of a log that ``commit`` counts."""
    check_there(path)
    length, stated = commit.bytes[path.stem], commit.checksums.get(path.stem)
    with path.open("rb") as file:
        committed = file.read(length)
    if len(committed) < length:
        raise damaged(path, f"it holds {len(committed)} bytes, fewer than the {length} committed")
    if stated not in (None, checksum(committed)):
        raise damaged(path)
    return committed


def _check_lengths(line: DataclassInstance, source: str) -> None:
    if isinstance(line, RoundLine):
        check_results(line.losses, len(line.cohort), f"{source}: losses")
        check_results(line.steps, len(line.cohort), f"{source}: steps")
        check_results([line.train_loss], 1, f"{source}: train_loss")
    elif isinstance(line, EvaluationLine):
        by_name = {name: getattr(line, name) for name in ("num_examples", "loss", "accuracy")}
        for name, values in (by_name | dict(line.metrics)).items():
            check_results(values, len(line.clients), f"{source}: {name}")


def read_refused(line: bytes, path: Path) -> RefusedResult:
    """Read a line of the refused.jsonl at ``path``."""
    return record(RefusedResult, load_json(line, str(path)), str(path))


def commit_of(folder: Path) -> Commit | None:
    """Read how far the trial in ``folder`` is; None before its first round."""
    return read_commit(folder) if has_commit(folder) else None


def read_commit(folder: Path) -> Commit:
    """Read how far the trial in ``folder`` is; InputError where the file is that of another one."""
    path = folder / "commit.json"
    content = read_json(path)
    best = records(BestRound, content.get("best", {}), f"{path}: best")
    commit = record(Commit, {**content, "best": best}, str(path))
    label, seed = trial_of(folder)
    check_belongs(path, "method", commit.label, label)
    check_belongs(path, "seed", commit.seed, seed)
    if commit.bytes.keys() != set(LOGS):
        raise InputError(f"{path} must hold bytes of {', '.join(LOGS)}")
    return commit
