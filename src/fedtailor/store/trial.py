"""The folder of a trial, a method with a seed: every round is committed at once, or not at all.

`TrialStore.commit` does it in three steps: the round's log lines and its state (the server's, and
the cohort's private rows, in a file of their own) are written beside what is there; then
``commit.json`` is renamed into place; then the private rows go to their places. After a kill at any
point the last commit's state is whole: log lines beyond the committed lengths are cut off, and the
rows are moved again.

The state of the best round so far, the one that will be reported, stays beside the last one: its
file of the server's state (for the global model's best round, too), and the private rows that have
been overwritten since (see `store.client_states`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from xxhash import xxh3_64

from ..data.federation import Federation
from ..engine.prepare import first_states
from ..engine.results import Round
from ..errors import naming
from ..method import Method, Server
from ..params import Params, add_prefix, aligned, strip_prefix
from ..task.task import Task
from ..uploads.norms import RECENT
from .best import best_rounds
from .client_states import FileStates, StoredStates, best_path, staged_path
from .committed import (
    COSTS_FILE,
    PRIVATE_FILE,
    RESULT_FILE,
    START_FILE,
    Commit,
    check_states,
    expected_files,
    finish_roll_back,
    load_state,
    read_commit,
    read_server,
    server_files,
    state_path,
    write_commit,
)
from .files import make_folder, save_tensors, write_json
from .format import REFUSED_FILE, as_json, check_committed, end_last_line, has_commit, held_checksum
from .lines import clients_line, confusion_of, history_line, timings_line
from .logs import LOGS, committed_bytes, read_log
from .metrics import Metric
from .records import RoundLine, Timing


class TrialStore:
    """The folder of one method with one seed. ``last`` is what its ``commit.json`` says."""

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
        self.last = Commit(0, rounds, False, dict.fromkeys(LOGS, 0))
        if has_commit(path):
            self.last = read_commit(path)
            check_committed(expected_files(path, self.last))
            if self.last.is_going_back:
                finish_roll_back(path, self.last)  # which a kill may have cut short
            if self.last.ended or self.last.is_going_back:
                self._drop_states()
        if self.last.finished:
            if self.last.rounds >= rounds:
                return
            self._reopen(rounds)
        self.last = replace(self.last, rounds=rounds)
        self._result.unlink(missing_ok=True)  # of a kill inside `finish` or `_reopen`
        for log in LOGS:
            file = self._log(log)
            file.touch()
            self._logged[log].update(committed_bytes(file, self.last))
            os.truncate(file, self.last.bytes[log])
        end_last_line(path / REFUSED_FILE)

    @property
    def _result(self) -> Path:
        return self.path / RESULT_FILE

    def _reopen(self, rounds: int) -> None:
        """Undo `finish`: the result is the last round's state again, as `write` left it."""
        number = self.last.round
        state = add_prefix(read_server(self.path, self.last, number), "server/")
        if (self.path / PRIVATE_FILE).exists():
            state["clients"] = torch.tensor(self.history()[-1].cohort)
        checksums = self._with_state(state_path(self.path, number), state)
        self._write_commit(replace(self.last, rounds=rounds, finished=False, checksums=checksums))
        self._result.unlink()

    def _log(self, name: str) -> Path:
        return self.path / f"{name}.jsonl"

    @property
    def has_begun(self) -> bool:
        """Whether a round is committed."""
        return self.last.has_model

    def open_states(self, method: Method, task: Task, federation: Federation) -> FileStates:
        """The file of the clients' private states."""
        initial = first_states(method, task, federation)
        return FileStates(federation.num_clients, initial, self.path / PRIVATE_FILE)

    def restore(self, states: StoredStates) -> Server | None:
        """Bring the clients' ``states`` to the last committed round; return the server's state
        after it, None if there is none. From now on states are staged there until `commit`."""
        self._states = states
        if not self.has_begun:
            return None
        state = load_state(state_path(self.path, self.last.round), self.last)
        if self.last.best:
            states.keep(self.last.best_round)
        if "clients" in state:
            states.adopt(self.last.round, state["clients"].tolist())
            states.commit()
        for name, checksum in states.checksums.items():
            check_states(self.path / name, checksum, self.last)
        return aligned(strip_prefix(state, "server/"))

    def earlier(self, number: int) -> Server | None:
        """The server's state after an earlier round, which clients in flight have been sent; None
        for the first state, which no round has made."""
        if number == 0 and not (self.path / START_FILE).exists():
            return None
        return read_server(self.path, self.last, number)

    @property
    def has_costs(self) -> bool:
        """Whether the file of costs is written."""
        return (self.path / COSTS_FILE).exists()

    @property
    def executor(self) -> str | None:
        """What ran the clients of the last committed round; None if nothing was chosen yet."""
        if self.last.round == 0:
            return None
        return read_log(Timing, self._log("timings"), self.last)[-1].executor

    def history(self) -> list[RoundLine]:
        """All committed rounds."""
        there = self.last.bytes["history"]
        return read_log(RoundLine, self._log("history"), self.last) if there else []

    def bounds(self) -> Mapping[str, Any]:
        """The last settings that bounded the norms of uploads; empty before the first round."""
        return next((line.bounds for line in reversed(self.history()) if line.bounds), {})

    def recent_norms(self) -> list[dict[int, float]]:
        """The norms of the uploads of the last committed rounds, by client."""
        return [line.norm_by_client for line in self.history()[-RECENT:]]

    def next_clip(self) -> float | None:
        """The clip of the round after the last committed one; None where it doesn't move."""
        return next((line.next_clip for line in self.history()[-1:]), None)

    def commit(self, done: Round, bounds: Mapping[str, Any] | None = None) -> None:
        """Commit a round, with the private states that are staged. ``bounds``: the settings that
        bound the norms of uploads, where they are others than before."""
        self.write(done, bounds)
        self._states.commit()

    def write(self, done: Round, bounds: Mapping[str, Any] | None = None) -> None:
        """Make a round durable: the part of `commit` after which a kill loses nothing of it."""
        states = self._states
        files = self._write_for_good(done)
        lines = {
            "history": [history_line(done, bounds or {})] if done.number else [],
            "clients": [clients_line(done, one, self._names) for one in done.evaluations],
            "timings": [timings_line(done, files)],
        }
        lengths = {log: self._append(log, some) for log, some in lines.items()}
        state = add_prefix(done.server, "server/")
        if states.staged:
            states.sync()
            state["clients"] = torch.tensor(states.staged)
        path = state_path(self.path, done.number)
        checksums = self._with_state(path, {n: v.cpu() for n, v in state.items()})
        checksums |= {log: logged.hexdigest() for log, logged in self._logged.items()}
        commit = Commit(
            done.number,
            self.last.rounds,
            False,
            lengths,
            best=best_rounds(self.last.best, done, self._metric),
            in_flight=() if done.faults is None else done.faults.versions,
            rolled_back=self.last.rolled_back,
        )
        if commit.best:
            states.keep(commit.best_round)
        self._write_commit(replace(commit, checksums={**checksums, **states.checksums}))
        self._drop_states()

    def _with_state(self, path: Path, state: Params) -> dict[str, str]:
        """Write a file of the server's state; the commit's checksums with that of the file."""
        save_tensors(path, state)
        checksum = held_checksum(path)
        assert checksum is not None
        return {**self.last.checksums, path.name: checksum}

    def _write_for_good(self, done: Round) -> dict[str, str | None]:
        """Write the files that no later round replaces; their names, tensors' checksums."""
        kinds = {"diagnostics": done.diagnostics, "confusion": confusion_of(done)}
        tensors = {f"{k}-{done.number:06d}.safetensors": v for k, v in kinds.items() if v}
        for name, values in tensors.items():
            save_tensors(self.path / name, values)
        shown = f"samples-{done.number:06d}.json"
        if done.samples:
            write_json(self.path / shown, {"samples": [asdict(one) for one in done.samples]})
        if done.costs is not None and not self.has_costs:
            write_json(self.path / COSTS_FILE, asdict(done.costs))
        once = {0: START_FILE, 1: COSTS_FILE}.get(done.number)
        files: dict[str, str | None] = {name: held_checksum(self.path / name) for name in tensors}
        files |= {shown: None} if done.samples else {}
        return {**files, once: None} if once and (self.path / once).exists() else files

    def finish(self) -> None:
        """Turn the last round's state into the run's result."""
        if self.last.finished:
            return
        server = read_server(self.path, self.last, self.last.round)
        checksums = self._with_state(self._result, server)
        self._write_commit(replace(self.last, finished=True, stopped=False, checksums=checksums))
        self._drop_states()

    def stop(self) -> None:
        """End for now with the last committed round; the next rounds can still be run."""
        self._write_commit(replace(self.last, stopped=True))

    def diverge(self, reason: str) -> None:
        """End with the last committed round: the next one's numbers are not finite."""
        self._write_commit(replace(self.last, diverged=reason))
        self._drop_states()

    def _append(self, log: str, objects: list[dict[str, Any]]) -> int:
        lines = b"".join(as_json(thing).encode() + b"\n" for thing in objects)
        with naming(self._log(log)), self._log(log).open("ab") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
            self._logged[log].update(lines)
            return file.tell()

    def _write_commit(self, commit: Commit) -> None:
        self.last = write_commit(self.path, commit)

    def _drop_states(self) -> None:
        """Remove all states but the last, the best, and those that clients in flight were sent."""
        commit, private = self.last, self.path / PRIVATE_FILE
        kept = {best_path(private, commit.best_round), *server_files(self.path, commit)}
        if not commit.finished:
            kept.add(staged_path(private, commit.round))
        for path in (*self.path.glob("round-*"), *self.path.glob("private-*")):
            if path not in kept:
                path.unlink()
