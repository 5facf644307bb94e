"""Writing a run directory: every round is committed at once, or not at all.

One method with one seed has one folder. A round becomes durable in three steps: its log lines and
its state (the server's, and the cohort's private rows, in a file of their own) are written beside
what is there; then ``commit.json`` is renamed into place; then the private rows go to their places
in the store. After a kill at any point the last commit's state is whole: log lines beyond the
committed lengths are cut off, and the rows are written again.

The state of the best round so far, the one that will be reported, stays beside the last one: its
file of the server's state (for the global model's best round, too), and the private rows that have
been overwritten since (see `engine.client_store`).
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import torch
from xxhash import xxh3_64

from ..engine.client_store import PrivateStates, best_path, staged_path
from ..engine.results import Round
from ..errors import InputError, naming
from ..method import Server
from ..params import Params, add_prefix, aligned, strip_prefix
from ..report.checked import load_json, record
from ..report.logs import LOGS, read_log
from ..report.read import read_environment
from ..report.records import Round as RoundLine
from ..report.records import Timing
from ..report.select import Metric
from ..run_format import (
    REFUSED_FILE,
    as_json,
    check_committed,
    committed_bytes,
    end_last_line,
    has_commit,
    held_checksum,
    seal_json,
)
from ..uploads.norms import RECENT
from .best import best_rounds
from .committed import (
    COSTS_FILE,
    PRIVATE_FILE,
    RESULT_FILE,
    START_FILE,
    Commit,
    check_states,
    expected_files,
    finish_roll_back,
    is_going_back,
    load_state,
    read_commit,
    read_server,
    server_files,
    state_path,
    write_commit,
)
from .files import make_folder, read_json, save_tensors, write_atomically
from .log_lines import clients_line, confusion_of, history_line, timings_line

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Record = TypeVar("Record", bound=DataclassInstance)

# all that a run directory holds; a command that writes something else there adds it here
OWN_FILES = frozenset(
    {
        ".lock",
        "environment.json",
        "experiment.json",
        "factory",
        "methods",
        "model.json",
        "metrics",
        "partitions",
        "report.html",
        "run.log",
        "tensorboard",
        "trace.json.gz",
    }
)

_GLANCE = 1.0  # seconds; who looks whether a run goes on holds the lock for far less
_locks: set[IO[str]] = set()  # of this process


def _release_locks() -> None:
    for file in _locks:
        file.close()


# a forked process would hold its parent's locks for as long as it lives
os.register_at_fork(after_in_child=_release_locks)


def give_id(out: Path) -> None:
    """Give the run directory ``out`` a random ``id`` in environment.json, which it keeps."""
    path = out / "environment.json"
    content = read_environment(out)
    if "id" not in content:
        write_atomically(path, seal_json({**content, "id": os.urandom(8).hex()}))


def check_removable(out: Path) -> None:
    """Check that ``out`` is a run directory and holds nothing else, so that it may be removed.

    Raises:
        InputError: it is not, or it does.
    """
    if not (out / "experiment.json").is_file():
        if out.exists() and (not out.is_dir() or {p.name for p in out.iterdir()} - {".lock"}):
            raise InputError(f"{out} is not a run directory: --overwrite removes nothing else")
        return
    if not {"methods", "rounds", "seeds"} <= read_json(out / "experiment.json").keys():
        raise InputError(f"{out} is not a run directory: --overwrite removes nothing else")
    others = sorted(path.name for path in out.iterdir() if not _is_ours(path))
    if others:
        raise InputError(
            f"{out} holds {', '.join(others)} beside the run: --overwrite removes nothing but runs"
        )


def remove_run(out: Path) -> None:
    """Remove what `check_removable` allows; the mark of a run goes last, the folder stays."""
    if not out.exists():
        return
    with locked(out):
        check_removable(out)
        for path in sorted(out.iterdir(), key=lambda path: path.name == "experiment.json"):
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != ".lock":
                path.unlink()


def _is_ours(path: Path) -> bool:
    return path.name.removesuffix(".new") in OWN_FILES and not path.is_symlink()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold ``folder`` for this process alone.

    Raises:
        InputError: another process is writing there.
    """
    import fcntl

    make_folder(folder)
    with (folder / ".lock").open("w") as file:
        end = time.monotonic() + _GLANCE
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise InputError(f"another process is writing to {folder}") from None
                time.sleep(_GLANCE / 20)
        _locks.add(file)
        try:
            yield
        finally:
            _locks.discard(file)


class RunDirectory:
    """The folder of one method with one seed."""

    def __init__(
        self,
        path: Path,
        rounds: int,
        metric: Metric = "accuracy",
        names: Sequence[str] | None = None,
    ) -> None:
        """Open or make it; what was not committed is cut off. One that has finished with fewer
        ``rounds`` goes on. The best round is the one of the best mean ``metric`` over clients on
        validation data. ``names`` are those of all clients, by number."""
        self.path = path
        self._metric = metric
        self._names = names
        make_folder(path)
        self._logged = {log: xxh3_64() for log in LOGS}  # the committed bytes
        self.commit = Commit(0, rounds, False, dict.fromkeys(LOGS, 0))
        if has_commit(path):
            self.commit = read_commit(path)
            check_committed(expected_files(path, self.commit))
        if is_going_back(self.commit):
            finish_roll_back(path, self.commit)  # which a kill may have cut short
        if self.commit.ended or is_going_back(self.commit):
            self._drop_states()
        if self.commit.finished:
            if self.commit.rounds >= rounds:
                return
            self._reopen(rounds)
        self.commit = replace(self.commit, rounds=rounds)
        self._result.unlink(missing_ok=True)  # of a kill inside `finish` or `_reopen`
        for log in LOGS:
            self._cut(log)
        end_last_line(path / REFUSED_FILE)

    @property
    def _result(self) -> Path:
        return self.path / RESULT_FILE

    def _reopen(self, rounds: int) -> None:
        """Undo `finish`: the result is the last round's state again, as `write` left it."""
        number = self.commit.round
        state = add_prefix(read_server(self.path, self.commit, number), "server/")
        if (self.path / PRIVATE_FILE).exists():
            (last,) = self._last_lines(RoundLine, "history", 1)
            state["clients"] = torch.tensor(last.cohort)
        checksums = self._with_state(state_path(self.path, number), state)
        self._commit(replace(self.commit, rounds=rounds, finished=False, checksums=checksums))
        self._result.unlink()

    def _last_lines(self, kind: type[Record], log: str, count: int) -> list[Record]:
        """What the log says of the last ``count`` committed rounds."""
        path = self._log(log)
        length, checksum = self.commit.bytes[log], self.commit.checksums.get(log)
        lines = committed_bytes(path, length, checksum).splitlines()[-count:]
        return [record(kind, load_json(line, str(path)), str(path)) for line in lines]

    def _log(self, name: str) -> Path:
        return self.path / f"{name}.jsonl"

    def _cut(self, log: str) -> None:
        path, length = self._log(log), self.commit.bytes[log]
        path.touch()
        committed = committed_bytes(path, length, self.commit.checksums.get(log))
        self._logged[log].update(committed)
        os.truncate(path, length)

    @property
    def has_begun(self) -> bool:
        """Whether a round is committed."""
        return has_commit(self.path) and self.commit.has_model

    def restore(self, store: PrivateStates) -> Server | None:
        """Bring ``store`` to the last committed round; that round's server state, None if none."""
        if not self.has_begun:
            return None
        state = load_state(state_path(self.path, self.commit.round), self.commit)
        self._keep_best(store, self.commit)
        if "clients" in state:
            store.adopt(self.commit.round, state["clients"].tolist())
            store.commit()
        for name, checksum in store.checksums.items():
            check_states(self.path / name, checksum, self.commit)
        return aligned(strip_prefix(state, "server/"))

    def earlier(self, number: int) -> Server | None:
        """The server's state after an earlier round, which clients in flight have been sent; None
        for the first state, which no round has made."""
        if number == 0 and not (self.path / START_FILE).exists():
            return None
        return read_server(self.path, self.commit, number)

    @property
    def has_costs(self) -> bool:
        """Whether the file of costs is written."""
        return self._has(COSTS_FILE)

    def _has(self, name: str) -> bool:
        return (self.path / name).exists()

    @property
    def executor(self) -> str | None:
        """What ran the clients of the last committed round; None if nothing was chosen yet."""
        if self.commit.round == 0:
            return None
        return self._last_lines(Timing, "timings", 1)[0].executor

    def history(self) -> list[RoundLine]:
        """All committed rounds."""
        return read_log(RoundLine, self._log("history"), self.commit)

    def bounds(self) -> Mapping[str, Any]:
        """The settings that bounded the norms of uploads in the last committed round; empty before
        the first."""
        return next((line.bounds for line in reversed(self.history()) if line.bounds), {})

    def recent_norms(self) -> list[dict[int, float]]:
        """The norms of the uploads of the last committed rounds, by client."""
        lines = self._last_lines(RoundLine, "history", RECENT)
        return [line.norm_by_client for line in lines]

    def write(
        self, done: Round, store: PrivateStates, bounds: Mapping[str, Any] | None = None
    ) -> None:
        """Commit a round whose private states are staged in ``store``. ``bounds``: the settings
        that bound the norms of uploads, where they are others than before."""
        files = self._write_for_good(done)
        history = [history_line(done, bounds or {})] if done.number else []
        lengths = {
            "history": self._append("history", history),
            "clients": self._append(
                "clients", [clients_line(done, e, self._names) for e in done.evaluations]
            ),
            "timings": self._append("timings", [timings_line(done, files)]),
        }
        state = add_prefix(done.server, "server/")
        if store.staged:
            store.sync()
            state["clients"] = torch.tensor(store.staged)
        path = state_path(self.path, done.number)
        checksums = self._with_state(path, {n: v.cpu() for n, v in state.items()})
        checksums |= {log: logged.hexdigest() for log, logged in self._logged.items()}
        commit = Commit(
            done.number,
            self.commit.rounds,
            False,
            lengths,
            best=best_rounds(self.commit.best, done, self._metric),
            in_flight=() if done.faults is None else done.faults.versions,
            rolled_back=self.commit.rolled_back,
        )
        self._keep_best(store, commit)
        self._commit(replace(commit, checksums={**checksums, **store.checksums}))
        self._drop_states()

    def _with_state(self, path: Path, state: Params) -> dict[str, str]:
        """Write a file of the server's state; the commit's checksums with that of the file."""
        save_tensors(path, state)
        checksum = held_checksum(path)
        assert checksum is not None
        return {**self.commit.checksums, path.name: checksum}

    def _write_for_good(self, done: Round) -> dict[str, str | None]:
        """Write the files that no later round replaces; their names, tensors' checksums."""
        kinds = {"diagnostics": done.diagnostics, "confusion": confusion_of(done)}
        tensors = {f"{k}-{done.number:06d}.safetensors": v for k, v in kinds.items() if v}
        for name, values in tensors.items():
            save_tensors(self.path / name, values)
        if done.costs is not None and not self.has_costs:
            write_atomically(self.path / COSTS_FILE, seal_json(asdict(done.costs)))
        once = {0: START_FILE, 1: COSTS_FILE}.get(done.number)
        files: dict[str, str | None] = {name: held_checksum(self.path / name) for name in tensors}
        return {**files, once: None} if once is not None and self._has(once) else files

    def finish(self) -> None:
        """Turn the last round's state into the run's result. The store must be committed."""
        if self.commit.finished:
            return
        server = read_server(self.path, self.commit, self.commit.round)
        checksums = self._with_state(self._result, server)
        self._commit(replace(self.commit, finished=True, stopped=False, checksums=checksums))
        self._drop_states()

    def stop(self) -> None:
        """End for now with the last committed round; the next rounds can still be run. The store
        must be committed."""
        self._commit(replace(self.commit, stopped=True))

    def diverge(self, reason: str) -> None:
        """End with the last committed round: the next one's numbers are not finite."""
        self._commit(replace(self.commit, diverged=reason))
        self._drop_states()

    def _append(self, log: str, objects: list[dict[str, Any]]) -> int:
        lines = b"".join(as_json(thing).encode() + b"\n" for thing in objects)
        with naming(self._log(log)), self._log(log).open("ab") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
            self._logged[log].update(lines)
            return file.tell()

    def _commit(self, commit: Commit) -> None:
        self.commit = write_commit(self.path, commit)

    def _keep_best(self, store: PrivateStates, commit: Commit) -> None:
        if commit.best:
            store.keep(commit.best_round)

    def _drop_states(self) -> None:
        """Remove all states but the last one, those of the best rounds, and those that clients in
        flight have been sent."""
        commit, private = self.commit, self.path / PRIVATE_FILE
        kept = {best_path(private, commit.best_round), *server_files(self.path, commit)}
        if not commit.finished:
            kept.add(staged_path(private, commit.round))
        for path in (*self.path.glob("round-*"), *self.path.glob("private-*")):
            if path not in kept:
                path.unlink()
