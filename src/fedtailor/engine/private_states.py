"""The private states of K clients, as rounds use them, and in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ..params import Params, clone


class PrivateStates(Protocol):
    """The clients' private states. A round stages what its clients keep; whoever it is handed out
    to makes it count (see `store.trial`)."""

    @property
    def has_states(self) -> bool:
        """Whether clients keep anything private at all."""

    def read(self, client: int) -> Params | None:
        """A client's private tensors, staged ones included, not to be changed in place; None where
        they lie at the client's site."""

    def prefetch(self, clients: Sequence[int]) -> None:
        """Begin to fetch what `read` will soon be asked for."""
        return

    def begin(self, round_: int) -> None:
        """Stage what follows as of ``round_``."""

    def stage(self, client: int, state: Params | None) -> None:
        """Let the client's state of this round count; None where it lies at the client's site."""

    def unstage(self, client: int) -> None:
        """Let the client's state of this round not count after all."""

    def discard(self) -> None:
        """Let nothing that is staged count."""


class MemoryStates(PrivateStates):
    """Private states in memory: of clients that have trained; others have ``initial(client)``. What
    is staged counts."""

    def __init__(self, initial: Callable[[int], Params]) -> None:
        self._initial = initial
        self._has_states = bool(initial(0))
        self._kept: dict[int, Params] = {}
        self._staged: dict[int, Params] = {}

    @property
    def has_states(self) -> bool:
        return self._has_states

    def read(self, client: int) -> Params:
        if client in self._staged:
            return self._staged[client]
        return clone(self._kept[client]) if client in self._kept else self._initial(client)

    def begin(self, round_: int) -> None:
        self._kept |= self._staged
        self._staged = {}

    def stage(self, client: int, state: Params | None) -> None:
        if state:
            self._staged[client] = clone(state)

    def unstage(self, client: int) -> None:
        self._staged.pop(client, None)

    def discard(self) -> None:
        self._staged = {}
