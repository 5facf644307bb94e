"""What the folder of one method with one seed holds as of its last commit."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ..method import Server
from ..params import Params, aligned, strip_prefix
from .checked import Count as Count
from .checked import Seed
from .client_states import HERE, IN_STORE, KEPT, best_path, bring_back, staged_path, state_in
from .files import load_tensors, read_record, write_atomically, write_json
from .format import REFUSED_FILE, check_committed, combined_checksum, damaged, trial_of, whole_lines
from .logs import LOGS, read_log
from .logs import commit_of as commit_of
from .logs import read_commit as read_commit
from .logs import read_refused as read_refused
from .records import Commit as Commit
from .records import Timing
from .row_file import RowFile

COSTS_FILE = "costs.json"  # of the first round
PRIVATE_FILE = "private.safetensors"
RESULT_FILE = "server.safetensors"  # the server's state after the last round
START_FILE = "start.json"  # written before round 0

MOST_ROLL_BACKS = 100  # over Flower each gives the run another name, which all sites are told


@dataclass(frozen=True)
class StartRecord:
    """What ``start.json`` says: what a trial goes on from, and how many of the old run's clients go
    on with it. ``model_seed`` is that of the values that the model and its adapters begin with."""

    run: str
    method: str
    seed: Seed
    round: Count
    model_seed: Seed
    clients: Count


def write_commit(folder: Path, commit: Commit) -> Commit:
    """Let ``commit``, with its own checksums alone, be the one that counts; returns it."""
    store = folder / PRIVATE_FILE
    private = [store, best_path(store, commit.best_round)]
    states = {path.name for path in (*server_files(folder, commit), *private)}
    checksums = {k: v for k, v in commit.checksums.items() if k in states or k in LOGS}
    label, seed = trial_of(folder)
    commit = replace(commit, checksums=checksums, label=label, seed=seed)
    content = asdict(commit)
    for name in ("in_flight", "rolled_back"):
        if not content[name]:
            del content[name]
    write_json(folder / "commit.json", content)
    return commit


def check_states(path: Path, checksum: str, commit: Commit) -> None:
    """Check that a file of private states, whose rows have this ``checksum``, was committed."""
    if commit.checksums.get(path.name) not in (None, checksum):
        staged = staged_path(path.with_name(PRIVATE_FILE), commit.round).name
        or_else = "" if commit.finished else f", or {staged} is missing"
        raise damaged(path, f"it is not the file that was committed{or_else}")


def expected_files(folder: Path, commit: Commit) -> dict[Path, str | None]:
    """The files that the folder of a trial must have, and the checksums that they must hold, if
    known. One that is missing is not read as if it had never been there."""
    files: dict[Path, str | None] = {folder / f"{log}.jsonl": None for log in LOGS}
    for timing in read_log(Timing, folder / "timings.jsonl", commit):
        files |= timing.files_in(folder)
    files |= {path: commit.checksums.get(path.name) for path in server_files(folder, commit)}
    if PRIVATE_FILE in commit.checksums:
        files |= dict.fromkeys(private_files(folder, commit))
    return files


def server_files(folder: Path, commit: Commit) -> list[Path]:
    """The files of the server's states: the last one, those of the best rounds, and those that
    clients in flight have been sent."""
    states = {about.round for about in commit.best.values()} | {*commit.in_flight}
    states -= {commit.round}
    if not (folder / START_FILE).exists():
        states -= {0}  # the first values, which need no file
    last = [last_state_path(folder, commit)] if commit.finished or commit.has_model else []
    return [*last, *(state_path(folder, number) for number in sorted(states))]


def private_files(folder: Path, commit: Commit) -> list[Path]:
    """The files that clients' private states must have, where clients keep something private."""
    store = folder / PRIVATE_FILE
    # the last round whose states have reached their places
    moved = commit.round - staged_path(store, commit.round).exists()
    return [store, best_path(store, commit.best_round)] if commit.best_round < moved else [store]


def state_path(folder: Path, number: int) -> Path:
    """Where the server's state after a round is, until another one is the last, or the best."""
    return folder / f"round-{number:06d}.safetensors"


def last_state_path(folder: Path, commit: Commit) -> Path:
    """Where the server's state after the last round is."""
    return folder / RESULT_FILE if commit.finished else state_path(folder, commit.round)


def load_state(path: Path, commit: Commit) -> Params:
    """The tensors in a file of the server's state, which must be the one that was committed."""
    state = load_tensors(path)
    check_committed({path: commit.checksums.get(path.name)})
    return state


def read_server(folder: Path, commit: Commit, number: int) -> Server:
    """The server's state after round ``number``: the last one, or a best one."""
    last = number == commit.round
    path = last_state_path(folder, commit) if last else state_path(folder, number)
    state = load_state(path, commit)
    return aligned(state if path.name == RESULT_FILE else strip_prefix(state, "server/"))


def model_seed(folder: Path, seed: int) -> int:
    """The seed of the values that the model and its adapters begin with, of the trial in
    ``folder``: its own, or that of the run it goes on from, since frozen values have to stay."""
    path = folder / START_FILE
    return read_record(StartRecord, path).model_seed if path.exists() else seed


def finish_roll_back(folder: Path, commit: Commit) -> None:
    """Do what is left to do in the folder of a trial once ``commit`` says that it went back to its
    best round: put the private states of that round into their places, and remove what later rounds
    have written for good, with the refusals in them. A kill loses nothing: it can be done again.
    Raises InputError where a file is missing or damaged."""
    bring_back(folder / PRIVATE_FILE, commit.round)
    for path in folder.glob("*-*.*"):
        match = re.fullmatch(r"(diagnostics|confusion|samples)-(\d+)", path.stem)
        if match and int(match[2]) > commit.round:
            path.unlink()
    path = folder / REFUSED_FILE
    kept = refusals_until(folder, commit.round)
    if path.exists() and len(kept) < path.stat().st_size:
        write_atomically(path, kept)


def refusals_until(folder: Path, number: int) -> bytes:
    """The refusals in the folder of a trial up to round ``number``."""
    path = folder / REFUSED_FILE
    lines = whole_lines(path) if path.exists() else []
    return b"".join(line for line in lines if read_refused(line, path).round <= number)


class CommittedStates:
    """The private tensors of the clients that had trained by round ``number``, the last one or the
    best, of the trial in ``folder``."""

    def __init__(self, folder: Path, number: int, commit: Commit) -> None:
        """Open the files that are there, which are checked."""
        store = folder / PRIVATE_FILE
        self._best = _opened(best_path(store, number), commit)
        self._last = _opened(store, commit)

    def read(self, client: int) -> Params:
        """A client's tensors; empty if it had not trained."""
        if self._best is not None:
            row = self._best.read(client)
            if (where := row.pop(KEPT)) != IN_STORE:
                return row if where == HERE else {}
        return state_in(self._last, client)


def _opened(path: Path, commit: Commit) -> RowFile | None:
    if not path.exists():
        return None
    file = RowFile.open(path)
    check_states(path, combined_checksum(file.checksums()), commit)
    return file
