"""Who takes part in a round, from which state of the server, and how much of the work each does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..data.federation import Federation
from .config import Plan


@dataclass(frozen=True)
class Member:
    """A client that trains: on ``steps`` batches, from the server's state after round ``version``.
    One that ``drops`` after its training sends nothing. One that is ``late`` sends its upload, and
    nobody waits for it."""

    client: int
    version: int
    steps: int
    drops: bool = False
    late: bool = False

    @property
    def counts(self) -> bool:
        """Whether the server gets its upload, and in time."""
        return not (self.drops or self.late)


@dataclass(frozen=True)
class Participants:
    """The ``members`` of a round, ascending by client, and those that have ``dropped`` before they
    trained. ``seconds`` is how long the round takes in simulated time, where that is known before
    it is run. ``versions`` are the earlier rounds whose states clients in flight have been sent,
    that are not back after this round."""

    members: tuple[Member, ...]
    dropped: tuple[int, ...] = ()
    seconds: float | None = None
    versions: tuple[int, ...] = ()

    @property
    def counted(self) -> list[int]:
        """The places of those members whose uploads are expected."""
        return [at for at, member in enumerate(self.members) if member.counts]


class Schedule(Protocol):
    """What says who takes part in one round after the other."""

    def next_round(self) -> Participants:
        """The participants of the next round."""


@dataclass
class Synchronous:
    """In each round a cohort is drawn, trains from the server's last state, and is waited for.
    ``number`` is the last round."""

    federation: Federation
    plan: Plan
    number: int = 0
    _cohort_size: int = field(init=False)

    def __post_init__(self) -> None:
        """Work out how many clients a cohort has."""
        cohort = self.plan.cohort
        self._cohort_size = cohort.count(self.federation.num_clients - cohort.novel)

    def next_round(self) -> Participants:
        """The cohort of the next round, and who of it drops out."""
        self.number += 1
        novel = self.plan.cohort.novel
        clients = self.federation.cohort(self.number, self._cohort_size, novel)
        return participants(self.federation, self.plan, self.number, clients)


def participants(
    federation: Federation, plan: Plan, number: int, clients: Sequence[int]
) -> Participants:
    """What becomes of ``clients``, ascending, that are sent the server's state after the round
    before round ``number``."""
    members, dropped = list[Member](), list[int]()
    for client in clients:
        fate = plan.faults.fate(federation.seed, number, client)
        if fate.drops_before:
            dropped.append(client)
            continue
        steps = federation.num_steps(client, plan.local)
        steps = fate.steps(steps) if fate.share < 1 else steps
        members.append(Member(client, number - 1, steps, drops=fate.drops_after))
    return Participants(tuple(members), tuple(dropped))
