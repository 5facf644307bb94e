"""Writing a run directory: every round is committed at once, or not at all.

One method with one seed has one folder. A round becomes durable in three steps: its log lines and
its state (the server's, and the cohort's private rows, in a file of their own) are written beside
what is there; then ``commit.json`` is renamed into place; then the private rows go to their places
in the store. After a kill at any point the last commit's state is whole: log lines beyond the
committed lengths are cut off, and the rows are written again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from ..engine.client_store import SEEN, PrivateStates, staged_path
from ..engine.costs import peak_memory_mb
from ..engine.rounds import Round
from ..errors import InputError
from ..method import Server
from ..params import Params, add_prefix, aligned, encode, strip_prefix

LOGS = ("history", "clients", "timings")


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, and durably."""
    fresh = path.with_name(path.name + ".new")
    with fresh.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        InputError: no such file, or it holds no JSON object.
    """
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise InputError(f"{path} is missing") from None
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} holds a {type(value).__name__}; it must hold an object")
    return value


def as_json(value: Any) -> bytes:
    """Indented JSON with a last newline."""
    return (json.dumps(value, indent=2) + "\n").encode()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold ``folder`` for this process alone.

    Raises:
        InputError: another process is writing there.
    """
    import fcntl

    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"another process is writing to {folder}") from None
        yield


@dataclass(frozen=True)
class Commit:
    """What ``commit.json`` says."""

    round: int
    rounds: int
    finished: bool
    bytes: dict[str, int]
    diverged: str | None = None  # why it stopped after that round, and will not go on
    stopped: bool = False  # a callback stopped it after that round; it can go on

    @property
    def ended(self) -> bool:
        return self.finished or self.diverged is not None


def _read_commit(path: Path) -> Commit:
    content = read_json(path)
    names = {field.name for field in fields(Commit)}
    if not names - {"stopped"} <= content.keys() <= names or content["bytes"].keys() != set(LOGS):
        raise InputError(f"{path} must hold {', '.join(sorted(names))}, and bytes of {LOGS}")
    return Commit(**content)


class RunDirectory:
    """The folder of one method with one seed."""

    def __init__(self, path: Path, rounds: int) -> None:
        """Open or make it; what was not committed is cut off."""
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self.commit = Commit(0, rounds, False, dict.fromkeys(LOGS, 0))
        if (path / "commit.json").exists():
            self.commit = _read_commit(path / "commit.json")
        if self.commit.finished:
            self._drop_states(keep=0)
            return
        for log in LOGS:
            self._cut(log)

    def _log(self, name: str) -> Path:
        return self.path / f"{name}.jsonl"

    def _cut(self, log: str) -> None:
        committed = self.commit.bytes[log]
        with self._log(log).open("ab") as file:
            if file.tell() < committed:
                raise InputError(
                    f"{self._log(log)} has {file.tell()} bytes, fewer than the {committed} that "
                    f"were committed; restore it, or choose another --out"
                )
            file.truncate(committed)

    def _state(self, number: int) -> Path:
        return self.path / f"round-{number:06d}.safetensors"

    def restore(self, store: PrivateStates) -> Server | None:
        """Bring ``store`` to the last committed round; that round's server state, None if none."""
        if self.commit.round == 0:
            return None
        path = self._state(self.commit.round)
        if not path.exists():
            raise InputError(f"{path} is missing; restore it, or choose another --out")
        state = load_file(path)
        if "clients" in state:
            store.adopt(self.commit.round, state["clients"].tolist())
            store.commit()
        return aligned(strip_prefix(state, "server/"))

    @property
    def executor(self) -> str | None:
        """What ran the clients of the last committed round; None if nothing was chosen yet."""
        if self.commit.round == 0:
            return None
        last = self._log("timings").read_bytes()[: self.commit.bytes["timings"]].splitlines()[-1]
        name: str | None = json.loads(last)["executor"]
        return name

    def write(self, done: Round, store: PrivateStates) -> None:
        """Commit a round whose private states are staged in ``store``."""
        if self.commit.stopped:  # it goes on: what was its result so far is out of date
            (self.path / "server.safetensors").unlink(missing_ok=True)
        lengths = {
            "history": self._append("history", [_history(done)]),
            "clients": self._append("clients", [_clients(done, e) for e in done.evaluations]),
            "timings": self._append("timings", [_timings(done)]),
        }
        state = add_prefix(done.server, "server/")
        if store.staged:
            store.sync()
            state["clients"] = torch.tensor(store.staged)
        write_atomically(self._state(done.number), encode({n: v.cpu() for n, v in state.items()}))
        if done.diagnostics:
            path = self.path / f"diagnostics-{done.number:06d}.safetensors"
            write_atomically(path, encode(done.diagnostics))
        if confusion := _confusion(done):
            path = self.path / f"confusion-{done.number:06d}.safetensors"
            write_atomically(path, encode(confusion))
        if not (self.path / "costs.json").exists():
            write_atomically(self.path / "costs.json", as_json(asdict(done.costs)))
        self._commit(Commit(done.number, self.commit.rounds, False, lengths))
        self._drop_states(keep=done.number)

    def finish(self) -> None:
        """Turn the last round's state into the run's result. The store must be committed."""
        if self.commit.finished:
            return
        self._write_server()
        self._commit(replace(self.commit, finished=True, stopped=False))
        self._drop_states(keep=0)

    def stop(self) -> None:
        """End for now with the last committed round, whose state is the result so far; the next
        rounds can still be run. The store must be committed."""
        self._write_server()
        self._commit(replace(self.commit, stopped=True))

    def _write_server(self) -> None:
        server = strip_prefix(load_file(self._state(self.commit.round)), "server/")
        write_atomically(self.path / "server.safetensors", encode(server))

    def diverge(self, reason: str) -> None:
        """End with the last committed round: the next one's numbers are not finite."""
        self._commit(replace(self.commit, diverged=reason))
        self._drop_states(keep=self.commit.round)

    def _append(self, log: str, objects: list[dict[str, Any]]) -> int:
        with self._log(log).open("ab") as file:
            file.writelines(json.dumps(thing).encode() + b"\n" for thing in objects)
            file.flush()
            os.fsync(file.fileno())
            return file.tell()

    def _commit(self, commit: Commit) -> None:
        write_atomically(self.path / "commit.json", as_json(asdict(commit)))
        self.commit = commit

    def _drop_states(self, keep: int) -> None:
        kept = self._state(keep), staged_path(self.path / "private.safetensors", keep)
        for path in (*self.path.glob("round-*"), *self.path.glob("private-*")):
            if path not in kept:
                path.unlink()


def _history(done: Round) -> dict[str, Any]:
    return {
        "round": done.number,
        "cohort": list(done.cohort.clients),
        "train_loss": sum(done.losses) / len(done.losses),
        "losses": list(done.losses),
        "steps": list(done.steps),
        "lr_scale": done.lr_scale,
        "bytes_down": done.bytes_down,
        "bytes_up": done.bytes_up,
    }


def _clients(done: Round, evaluation: Any) -> dict[str, Any]:
    line = {"round": done.number, **vars(evaluation)}
    del line["confusion"]
    if not line["metrics"]:  # none were asked for
        del line["metrics"]
    return line


def _confusion(done: Round) -> Params:
    """``MODEL/SPLIT`` ``[n, classes, classes]`` and the clients ``MODEL/clients`` ``[n]``."""
    tensors: Params = {}
    for one in done.evaluations:
        if one.confusion is not None:
            tensors[f"{one.model}/{one.split}"] = torch.from_numpy(one.confusion).int()
            tensors[f"{one.model}/clients"] = torch.tensor(one.clients)
    return tensors


def _timings(done: Round) -> dict[str, Any]:
    seconds = {name: round(value, 4) for name, value in done.seconds.items()}
    return {
        "round": done.number,
        "seconds": seconds,
        "executor": done.executor,
        "peak_memory_mb": round(peak_memory_mb(), 1),
    }


def read_private(path: Path, client: int) -> Params:
    """A client's tensors in a store's file; empty if it never trained."""
    with safe_open(path, "pt") as file:
        if not file.get_slice(SEEN)[client]:
            return {}
        return {n: file.get_slice(n)[client] for n in file.keys() if n != SEEN}  # noqa: SIM118
