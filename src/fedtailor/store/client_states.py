"""The private states of K clients: one tensor ``[K, ...]`` a name in a sparse file.

What a round changes is staged, client by client, in another file beside it, named after the round.
It reaches its place in `commit`, after the caller has made the round durable (see `store.trial`).
So no more than a client's state is in memory.

The states as of the best round so far are kept, too: a row that is overwritten for the first time
since that round is copied before, to a file named after the best round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ..engine.private_states import PrivateStates
from ..errors import InputError
from ..params import Params
from .files import sync_folder
from .format import combined_checksum
from .row_file import RowFile

SEEN = "__seen__"  # uint8 [K]: 1 for a client whose row has been written
KEPT = "__kept__"  # uint8 [K], in the file of the best round: where a client's state of then is
IN_STORE, HERE, NOWHERE = range(3)  # nowhere: the client had not trained


class StoredStates(PrivateStates, Protocol):
    """Private states that a trial commits round by round: what is staged is made durable, and goes
    to its place once ``commit.json`` says that it counts."""

    @property
    def staged(self) -> tuple[int, ...]:
        """The clients whose states are staged here."""

    def sync(self) -> None:
        """Make durable what is staged here."""

    def adopt(self, round_: int, clients: Sequence[int]) -> None:
        """Stage again what a killed run had made durable."""

    @property
    def checksums(self) -> dict[str, str]:
        """By file name one of all states, as they are once what is staged is committed."""

    def keep(self, round_: int) -> None:
        """Let the states after ``round_``, the one that is staged or was committed last, be kept
        beside the latest ones, in place of those of the round that was kept before."""

    def commit(self) -> None:
        """Move what is staged to its place."""


class FileStates(StoredStates):
    """Private states in a file, by client number; a client that has none yet gets
    ``initial(client)``. Where clients keep nothing private, there is no file."""

    def __init__(self, num_clients: int, initial: Callable[[int], Params], path: Path) -> None:
        self._initial = initial
        self._staged: set[int] = set()
        self._path = path
        self._rows, self._example = num_clients, initial(0)
        self._file: RowFile | None = None
        self._staging: RowFile | None = None  # where states are staged
        self._round = 0  # what is staged
        self._best_round: int | None = None  # whose states are kept
        self._best: RowFile | None = None  # rows as of the best round that have changed since
        self._adopted: frozenset[int] = frozenset()  # whose copies a kill may have cut short
        self._row = {**self._example, SEEN: _flag(0)[0]}
        self._sum: int | None = None  # of the file's checksums ...
        self._next_sum: int | None = None  # ... and what it is once what is staged is committed
        self._best_sum: int | None = None  # of those of the best round's file
        if self._example:
            self._file = RowFile(path, num_clients, self._row)

    @property
    def has_states(self) -> bool:
        return bool(self._example)

    def read(self, client: int) -> Params:
        if not self.has_states:
            return {}
        file = self._staging if client in self._staged else self._file
        return state_in(file, client) or self._initial(client)

    def prefetch(self, clients: Sequence[int]) -> None:
        if self._file is not None:
            for client in clients:
                self._file.prefetch(client)

    def begin(self, round_: int) -> None:
        if self._staged:
            raise RuntimeError(f"round {self._round} is not committed, and round {round_} begins")
        self._round = round_
        self.discard()

    def discard(self) -> None:
        self._staged, self._next_sum, self._staging = set(), None, None
        if self.has_states:  # perhaps of a run that was killed
            staged_path(self._path, self._round).unlink(missing_ok=True)

    def adopt(self, round_: int, clients: Sequence[int]) -> None:
        self._round = round_
        if staged_path(self._path, round_).exists():
            self._staging = self._open_staging()
            self._staged = set(clients)
            self._adopted = frozenset(clients)

    def _open_staging(self) -> RowFile:
        return RowFile(staged_path(self._path, self._round), self._rows, self._row)

    def stage(self, client: int, state: Params | None) -> None:
        if state:
            self._staging = self._staging or self._open_staging()
            self._staging.write(client, {**_as_rows(state), SEEN: _flag(1)})
            self._staged.add(client)

    def unstage(self, client: int) -> None:
        self._staged.discard(client)

    @property
    def staged(self) -> tuple[int, ...]:
        return tuple(sorted(self._staged))

    def sync(self) -> None:
        if self._staging is not None:
            self._staging.sync()

    @property
    def checksums(self) -> dict[str, str]:
        if self._file is None:
            return {}
        if self._sum is None:
            self._sum = self._file.checksums()
        self._next_sum = self._sum
        if self._staging is not None:
            now, file = self._staging, self._file
            self._next_sum += sum(now.share(c) - file.share(c) for c in self._staged)
        found = {self._path: self._next_sum}
        if self._best_round is not None and self._best_round < self._round:
            best = self._open_best(self._best_round)
            if self._best_sum is None:
                self._best_sum = best.checksums()
            copies = {k: best.share_of(k, self._copy(k)) for k in self._not_kept()}
            change = sum(copies.values()) - sum(map(best.share, copies))
            found[best_path(self._path, self._best_round)] = self._best_sum + change
        return {path.name: combined_checksum(total) for path, total in found.items()}

    def keep(self, round_: int) -> None:
        if round_ != self._best_round:
            self._best_round, self._best, self._best_sum = round_, None, None

    def commit(self) -> None:
        if self._file is not None and self._staging is not None:
            if self._best_round is not None and self._best_round < self._round:
                self._save_best_rows(self._best_round)
            self._sum, self._next_sum = self._next_sum, None
            for client in sorted(self._staged):
                if client in self._adopted:  # a kill has left it
                    self._staging.read(client)  # which checks it
                self._file.copy(client, self._staging)
            self._file.sync()
            self._staging = None
            staged_path(self._path, self._round).unlink()
        self._staged, self._adopted = set(), frozenset()

    def _save_best_rows(self, number: int) -> None:
        best = self._open_best(number)
        for client in (changed := self._not_kept()):
            before = best.share(client)
            best.write(client, self._copy(client))
            if self._best_sum is not None:
                self._best_sum += best.share(client) - before
        if changed:
            best.sync()

    def _open_best(self, number: int) -> RowFile:
        if self._best is None:
            path = best_path(self._path, number)
            self._best = RowFile(path, self._rows, {**self._example, KEPT: _flag(IN_STORE)[0]})
            sync_folder(path.parent)
        return self._best

    def _copy(self, client: int) -> Params:
        state = state_in(self._file, client)
        return {**_as_rows(state), KEPT: _flag(HERE if state else NOWHERE)}

    def _not_kept(self) -> list[int]:
        """Clients whose states a commit will overwrite for the first time since the best round."""
        return [client for client in sorted(self._staged) if not self._is_kept(client)]

    def _is_kept(self, client: int) -> bool:
        """Whether the client's state as of the best round has been copied. A copy that is damaged
        is one that a kill has cut short, if the killed run had staged the client's next state, and
        the store still has the row before it."""
        assert self._best is not None
        assert self._file is not None
        assert self._staging is not None
        try:
            return bool(self._best.read(client)[KEPT] != IN_STORE)
        except InputError:
            if not self._best.is_written(client):
                return False
            is_stored = self._file.checksum(client) == self._staging.checksum(client)
            if client not in self._adopted or is_stored:
                raise
            self._file.read(client)
            return False


def _flag(value: int) -> Tensor:
    return torch.tensor([value], dtype=torch.uint8)


def state_in(file: RowFile | None, client: int) -> Params:
    """The client's state in a file of states; empty if it is not there."""
    row = {} if file is None else file.read(client)
    return row if row.pop(SEEN, 0) else {}


def best_path(store: Path, round_: int) -> Path:
    """Where the states of the best round are that have changed in ``store`` since."""
    return store.with_name(f"{store.stem}-best-{round_:06d}{store.suffix}")


def bring_back(store: Path, round_: int) -> None:
    """Put the states of the best round back; a second time there is nothing to do."""
    path = best_path(store, round_)
    if not path.exists():
        return
    best, file = RowFile.open(path), RowFile.open(store)
    for client in best.written():
        row = best.read(client)
        if (where := row.pop(KEPT)) != IN_STORE:
            file.write(client, {**_as_rows(row), SEEN: _flag(int(where == HERE))})
    file.sync()
    path.unlink()


def staged_path(store: Path, round_: int) -> Path:
    """Where the states that a round has changed are staged, for the store at ``store``."""
    return store.with_name(f"{store.stem}-{round_:06d}{store.suffix}")


def _as_rows(state: Params) -> Params:
    return {name: value[None] for name, value in state.items()}
