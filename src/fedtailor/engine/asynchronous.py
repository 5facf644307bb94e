"""Buffered asynchronous aggregation in simulated time.

Federated Learning with Buffered Asynchronous Aggregation. J. Nguyen, K. Malik, H. Zhan,
A. Yousefpour, M. Rabbat, M. Malek, D. Huba. AISTATS 2022 (FedBuff).

A fixed number of clients is in flight: each has been sent the server's state of then, trains, and
sends its update. As soon as the buffer holds so many updates, the server aggregates them, which is
a round. A client that comes back frees its place, and another one is sent the server's state.

A stale upload counts less (`uploads.staleness`), and the method makes the server's next state of
these, with its own weights and its own step.

Between two states of the server no client is sent a state twice, or one after it has come back.
So the random numbers of each training have a key of their own; and with all clients in flight and
a buffer for all of them, rounds are synchronous. Who is in flight depends on times and keys alone,
not on what clients train: the schedule of a run that goes on is worked out again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heappop, heappush

from .. import random
from ..data.federation import Federation
from ..method import Method
from .config import Plan
from .faults import TimeModel
from .participants import Member, Participants, Schedule, participants, synchronous_round


@dataclass(order=True, frozen=True)
class _Flight:
    """A client that is not back yet; of those that come at the same moment, the first that was sent
    a state is the first."""

    back: float
    sent: int
    member: Member = field(compare=False)


@dataclass
class Buffered:
    """The schedule of rounds that each end when the buffer is full."""

    federation: Federation
    plan: Plan
    time: TimeModel
    number: int = 0  # the round
    now: float = 0.0  # simulated seconds
    _flights: list[_Flight] = field(default_factory=list)  # a heap
    _sent: int = 0
    _novel: frozenset[int] = field(init=False)
    _concurrency: int = field(init=False)

    def __post_init__(self) -> None:
        self._novel = self.federation.novel(self.plan.cohort.novel)
        self._concurrency = self.plan.cohort_size(self.federation)

    def next_round(self, number: int) -> Participants:
        """The clients that come back until the buffer is full, or until none is left that may be
        sent the server's state."""
        self.number = number
        size = self.plan.cohort.buffer
        assert size is not None
        begun, uploads = self.now, 0
        back, dropped = list[Member](), list[int]()
        self._send(back, dropped)
        while self._flights and uploads < size:
            flight = heappop(self._flights)
            self.now = flight.back
            back.append(flight.member)
            uploads += flight.member.counts
            # those of one moment are all heard before another client is sent a state
            if uploads < size and not (self._flights and self._flights[0].back == self.now):
                self._send(back, dropped)
        members = tuple(sorted(back, key=lambda member: member.client))
        versions = tuple(sorted({flight.member.version for flight in self._flights}))
        return Participants(members, tuple(sorted(dropped)), self.now - begun, versions)

    def _send(self, back: list[Member], dropped: list[int]) -> None:
        """Send the server's state to other clients until enough are in flight; add those that drop
        before they train to ``dropped``."""
        while len(self._flights) < self._concurrency:
            client = self._draw({*dropped, *(member.client for member in back)})
            if client is None:
                return
            rounds = range(self.number, self.number + 1)
            found = participants(self.federation, self.plan, self.number, {client: rounds})
            dropped += found.dropped
            for member in found.members:
                heappush(self._flights, self._flight(member))
            self._sent += 1

    def _draw(self, heard_of: set[int]) -> int | None:
        """A client that is not in flight and has not been heard of since the server's last state;
        None if there is none."""
        in_flight = {flight.member.client for flight in self._flights}
        excluded = sorted(self._novel | in_flight | heard_of)
        left = self.federation.num_clients - len(excluded)
        if left == 0:
            return None
        rng = random.generator(self.federation.seed, "in flight", self.number, self._sent)
        client = int(rng.integers(left))
        for other in excluded:
            client += other <= client
        return client

    def _flight(self, member: Member) -> _Flight:
        down, up = self.time.bytes_down, 0 if member.drops else self.time.bytes_up
        seconds = self.time.seconds(member.client, member.steps, down, up)
        deadline = self.plan.faults.deadline
        if deadline is not None and seconds > deadline:
            member = replace(member, late=not member.drops)
            seconds = deadline
        return _Flight(self.now + seconds, self._sent, member)


def schedule(
    method: Method, federation: Federation, plan: Plan, time: TimeModel | None, start: int
) -> tuple[Schedule, tuple[int, ...]]:
    """Who takes part from round ``start`` on; and the earlier rounds whose states the clients that
    are in flight by then have been sent."""
    if plan.cohort.buffer is None:
        return partial(synchronous_round, method, federation, plan), ()
    assert time is not None
    buffered = Buffered(federation, plan, time)
    versions: tuple[int, ...] = ()
    for number in range(1, start):
        versions = buffered.next_round(number).versions
    return buffered.next_round, versions
