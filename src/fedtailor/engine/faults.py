"""Faults in simulation: clients that drop out, do a part of their work, or are slow.

Every draw has a key of the run's seed, the round and the client: nothing else changes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Ge, Gt, Le
from numpy.typing import NDArray

from .. import random
from ..errors import InputError

Rate = Annotated[float, Ge(0), Le(1)]
Share = Annotated[float, Gt(0), Le(1)]
Speed = Annotated[float, Ge(1), Le(1e18)]  # a second: what comes of it stays finite


@dataclass(frozen=True)
class Machine:
    """A kind of machine that clients have. What is None takes no time."""

    # of the clients, beside the shares of the other kinds
    share: Annotated[float, Gt(0), Le(1e6)] = 1.0
    flops_per_second: Speed | None = None
    bytes_per_second_down: Speed | None = None
    bytes_per_second_up: Speed | None = None

    def seconds(self, flops: float, bytes_down: int, bytes_up: int) -> float:
        """How long a client needs to receive, to train and to send.

        >>> Machine(flops_per_second=100, bytes_per_second_up=10).seconds(200, 5, 30)
        5.0
        """
        parts = (
            (flops, self.flops_per_second),
            (bytes_down, self.bytes_per_second_down),
            (bytes_up, self.bytes_per_second_up),
        )
        return sum(amount / speed for amount, speed in parts if speed is not None)


@dataclass(frozen=True)
class ClientFaults:
    """The rates and the machine of some clients; None: as the others have."""

    clients: tuple[Annotated[int, Ge(0), Le(1_000_000_000)], ...] = ()
    drop_before: Rate | None = None
    drop_after: Rate | None = None
    partial: Share | None = None
    # its place in `FaultConfig.machines`, from 0
    machine: Annotated[int, Ge(0), Le(1_000_000)] | None = None


@dataclass(frozen=True)
class Fate:
    """What happens to one client in one round. It trains on ``share`` of its local steps."""

    drops_before: bool = False
    drops_after: bool = False
    share: float = 1.0

    def steps(self, num_steps: int) -> int:
        """How many of its local steps the client does, at least one.

        >>> Fate(share=0.5).steps(9), Fate(share=0.01).steps(9)
        (4, 1)
        """
        return max(1, round(self.share * num_steps))


@dataclass(frozen=True)
class FaultConfig:
    """How often clients drop out of a round before and after their training, the least share of
    their local steps that they do, and how fast they are."""

    drop_before: Rate = 0.0  # probability, for each client and round
    drop_after: Rate = 0.0
    partial: Share = 1.0  # a client's share of its steps is drawn between this and 1
    # simulated seconds; None: the slowest is waited for
    deadline: Annotated[float, Gt(0), Le(1e15)] | None = None
    machines: tuple[Machine, ...] = ()  # (): time is not simulated
    by_client: tuple[ClientFaults, ...] = ()

    @property
    def is_active(self) -> bool:
        """Whether it changes anything."""
        return self != FaultConfig()

    def check(self, num_clients: int) -> None:
        """Raise InputError if the settings don't fit each other or the federation."""
        if self.deadline is not None and not self.machines:
            raise InputError(
                f"faults.deadline = {self.deadline} needs to know how fast clients are: add "
                "[[faults.machines]]"
            )
        named: set[int] = set()
        for one in self.by_client:
            if not one.clients:
                raise InputError("faults.by_client has an entry without clients")
            for client in one.clients:
                if client >= num_clients:
                    raise InputError(
                        f"faults.by_client has client {client}; the {num_clients} clients are 0 to "
                        f"{num_clients - 1}"
                    )
                if client in named:
                    raise InputError(f"faults.by_client has client {client} twice")
                named.add(client)
            if one.machine is not None and one.machine >= len(self.machines):
                raise InputError(
                    f"faults.by_client has machine {one.machine}, and there are "
                    f"{len(self.machines)} in [[faults.machines]], counted from 0"
                )

    def of(self, client: int) -> ClientFaults:
        """What is set for one client alone."""
        return next((one for one in self.by_client if client in one.clients), ClientFaults())

    def fate(self, seed: int, round_: int, client: int) -> Fate:
        """What happens to a client in a round."""
        if not self.is_active:
            return Fate()
        own = self.of(client)
        before = self.drop_before if own.drop_before is None else own.drop_before
        after = self.drop_after if own.drop_after is None else own.drop_after
        least = self.partial if own.partial is None else own.partial
        first, second, third = random.generator(seed, "faults", round_, client).random(3).tolist()
        return Fate(first < before, second < after, least + (1 - least) * third)

    def kinds(self, seed: int, num_clients: int) -> NDArray[np.int64]:
        """The machine of each client, int64 ``[K]``: drawn so that the kinds have their shares of
        the clients, up to rounding."""
        shares = np.cumsum([machine.share for machine in self.machines])
        ends = np.round(shares / shares[-1] * num_clients)
        kinds = np.empty(num_clients, np.int64)
        order = random.generator(seed, "machines").permutation(num_clients)
        kinds[order] = np.searchsorted(ends, np.arange(num_clients), side="right")
        for one in self.by_client:
            if one.machine is not None:
                kinds[list(one.clients)] = one.machine
        return kinds


@dataclass(frozen=True)
class TimeModel:
    """How long clients need: FLOPs / speed + bytes / link. ``kinds`` ``[K]`` are their machines;
    ``flops`` are those of one local step. ``bytes_down`` and ``bytes_up`` are what a client
    receives and sends, where all send the same."""

    machines: tuple[Machine, ...]
    kinds: NDArray[np.int64]
    flops: int
    bytes_down: int
    bytes_up: int

    def seconds(self, client: int, steps: int, bytes_down: int, bytes_up: int) -> float:
        """From the moment when the server begins to send to when it has the client's upload."""
        machine = self.machines[int(self.kinds[client])]
        return machine.seconds(steps * self.flops, bytes_down, bytes_up)
