"""What comes of a round: of its training, of those who took part, and all of it."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..method import Cohort, Server
from ..params import Params
from ..uploads.accounting import Spent
from .client import ClientUpdate
from .config import Plan
from .costs import Costs
from .executors.work import Refusal
from .participants import Member, Participants
from .scoring import Evaluation
from .writing import Sample


@dataclass
class CohortResults:
    """What has come of a round's training: ``losses`` of the usable results, by position in the
    cohort. ``trained`` clients have trained, on ``trained_steps`` batches in all, whether their
    updates count or not. The costs are those of the first in training order; ``refusals`` are by
    place in that order, each with its client. ``late`` has the simulated seconds of clients that
    are not back in time, and ``seconds`` those of the slowest."""

    losses: dict[int, float] = field(default_factory=dict)
    refusals: dict[int, tuple[int, Refusal]] = field(default_factory=dict)
    late: dict[int, float] = field(default_factory=dict)  # by client
    unchanged: list[int] = field(default_factory=list)  # clients, as `Round.unchanged`
    seconds: float = 0.0
    trained: int = 0
    trained_steps: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    costs: Costs | None = None
    data_seconds: float = 0.0
    cpu_seconds: float = 0.0
    _first: int = sys.maxsize  # the place in training order behind `costs`

    def add(
        self, place: int, position: int | None, steps: int, update: ClientUpdate, *, sends: bool
    ) -> None:
        """Take the update of the client at ``place`` of the training order, after so many
        ``steps``. It counts if it has a ``position`` in the cohort, and has cost bytes if the
        client ``sends`` it."""
        if position is not None:
            self.losses[position] = update.loss
        self.trained += 1
        self.trained_steps += steps
        self.bytes_down += sum(update.costs.down.values())
        self.bytes_up += sum(update.costs.up.values()) if sends else 0
        self.data_seconds += update.data_seconds
        self.cpu_seconds += update.cpu_seconds
        if place < self._first:
            self._first, self.costs = place, update.costs


@dataclass(frozen=True)
class RoundFaults:
    """What became of those that a round was begun with, where faults are simulated: clients that
    ``dropped_before`` or ``dropped_after`` they trained, and those whose uploads were ``late``.
    ``seconds`` is the simulated time; None: it is not simulated. In asynchronous rounds
    ``staleness`` has an entry a cohort member, and ``versions`` are the earlier rounds whose states
    clients in flight have been sent."""

    dropped_before: tuple[int, ...]
    dropped_after: tuple[int, ...]
    late: tuple[int, ...]
    seconds: float | None
    staleness: tuple[int, ...] | None = None
    versions: tuple[int, ...] = ()


@dataclass(frozen=True)
class Round:
    """What one round has done. ``losses`` and ``steps`` have one entry a cohort member; bytes are
    those of all clients that have trained. These are ``trained``, on ``trained_steps`` batches in
    all, whether their updates count or not. ``diagnostics`` are the method's, after an evaluation:
    ``server/NAME`` (where they are by client, those of ``server_clients``) and ``client/NAME``
    ``[n, ...]`` of ``clients``. ``notes`` say in words which clients it went on without, and why.

    Round 0, of a run that goes on from another one's states, has evaluations alone: nobody takes
    part, and nothing is sent. Nobody is in the cohort of a round that comes to nothing, either.
    ``cpu_seconds`` is the processor time of the clients' training, None where it is not known."""

    number: int
    server: Server
    cohort: Cohort
    evaluations: tuple[Evaluation, ...]
    diagnostics: Params
    seconds: dict[str, float]
    executor: str | None  # what the clients were run by; None: `auto` has not chosen yet
    losses: tuple[float, ...] = ()
    steps: tuple[int, ...] = ()
    lr_scale: float = 0.0
    trained: int = 0
    trained_steps: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    costs: Costs | None = None  # None if nobody has trained
    notes: tuple[str, ...] = ()
    cpu_seconds: float | None = None
    norms: tuple[float, ...] = ()  # of the members' uploads; empty where there is no bound on them
    faults: RoundFaults | None = None  # None: none are simulated
    samples: tuple[Sample, ...] = ()  # of what models write, where they do
    privacy: Spent | None = None  # by all rounds so far; None: there is no noise
    clip: float | None = None  # of updates in this round, and in the next; None: always the same
    next_clip: float | None = None
    # who sent under [privacy] that they change nothing; for stderr alone, and never over Flower
    unchanged: tuple[int, ...] = ()

    @property
    def train_loss(self) -> float | None:
        """The mean training loss over the cohort; None if nobody is in it."""
        return sum(self.losses) / len(self.losses) if self.losses else None


def round_faults(
    plan: Plan, drawn: Participants, results: CohortResults, used: Sequence[Member], number: int
) -> RoundFaults | None:
    """What became of all who were ``drawn`` in round ``number``; the updates of those ``used``
    count. None if no faults are simulated."""
    faults, members = plan.faults, drawn.members
    if not faults.is_active:
        return None
    seconds = drawn.seconds
    if seconds is None and faults.machines:
        seconds = min(results.seconds, faults.deadline or math.inf)
    late = {*results.late, *(member.client for member in members if member.late)}
    staleness = tuple(number - 1 - member.version for member in used)
    return RoundFaults(
        dropped_before=drawn.dropped,
        dropped_after=tuple(member.client for member in members if member.drops),
        late=tuple(sorted(late)),
        seconds=seconds,
        staleness=None if plan.cohort.buffer is None else staleness,
        versions=drawn.versions,
    )
