"""The private state of K clients: one tensor ``[K, ...]`` a name in a sparse file, or in memory
what clients that have trained keep.

What a round has changed is staged, and reaches the file in `commit`, after the caller has made the
round durable elsewhere (see ``history``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from .params import Params
from .rows import RowFile

SEEN = "__seen__"  # uint8 [K]: 1 for a client whose row has been written


class Store:
    """Private states by client number; a client that has none yet gets ``initial(client)``."""

    def __init__(
        self, num_clients: int, initial: Callable[[int], Params], path: Path | None = None
    ) -> None:
        """Open ``path``, made if it is not there; without one the states live in memory."""
        self._initial = initial
        self._staged: dict[int, Params] = {}
        self._kept: dict[int, Params] = {}  # in memory
        self._file: RowFile | None = None
        example = initial(0)
        self.has_states = bool(example)
        if path is not None and example:
            seen = torch.zeros((), dtype=torch.uint8)
            self._file = RowFile(path, num_clients, {**example, SEEN: seen})

    def read(self, client: int) -> Params:
        """The client's private tensors, staged ones included; not to be changed in place."""
        if not self.has_states:
            return {}
        if client in self._staged:
            return self._staged[client]
        if self._file is not None:
            stored = self._file.read(client)
            if stored.pop(SEEN):
                return stored
        elif client in self._kept:
            return {name: value.clone() for name, value in self._kept[client].items()}
        return self._initial(client)

    def expect(self, clients: Sequence[int]) -> None:
        """Begin to fetch from the disk what `read` will soon be asked for."""
        if self._file is not None:
            for client in clients:
                self._file.expect(client)

    def stage(self, clients: Sequence[int], states: Sequence[Params]) -> None:
        """Let `read` see new states before they are committed."""
        self._staged = dict(zip(clients, states, strict=True))

    @property
    def staged(self) -> dict[int, Params]:
        """What the round has changed, by client."""
        return self._staged

    def commit(self) -> None:
        """Write the staged states into their rows and, with a file, through to the disk."""
        staged = {client: state for client, state in self._staged.items() if state}
        self._staged = {}
        if self._file is None:
            for client, state in staged.items():
                self._kept[client] = {name: value.clone() for name, value in state.items()}
        elif staged:
            seen = torch.ones(1, dtype=torch.uint8)
            for client, state in staged.items():
                self._file.write(client, {**{n: v[None] for n, v in state.items()}, SEEN: seen})
            self._file.sync()
