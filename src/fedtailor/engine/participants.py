"""Who takes part in a round, from which state of the server, and how much of the work each does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ..data.federation import Federation
from ..method import Method
from ..uploads.accounting import PrivacyConfig
from .config import Plan


@dataclass(frozen=True)
class Member:
    """A client that trains: on ``steps`` batches, from the server's state after round ``version``,
    with ``lr_scale`` times the learning rates, which rise by ``lr_slope`` of it. One that ``drops``
    after its training sends nothing. One that is ``late`` sends its upload; nobody waits for it."""

    client: int
    version: int
    steps: int
    lr_scale: float
    drops: bool = False
    late: bool = False
    lr_slope: float = 0.0

    @property
    def like(self) -> tuple[int, float, float]:
        """What members that train together have in common."""
        return self.version, self.lr_scale, self.lr_slope

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


Schedule = Callable[[int], Participants]
"""Who takes part in a round, by its number; asked of one round after the other."""


def synchronous_round(
    method: Method, federation: Federation, plan: Plan, number: int
) -> Participants:
    """The cohort that trains from the server's last state and is waited for, and who drops out."""
    clients = draw_cohort(method, federation, plan, number)
    return participants(federation, plan, number, clients)


def draw_cohort(
    method: Method, federation: Federation, plan: Plan, number: int
) -> dict[int, range]:
    """The clients that are asked to take part in round ``number`` of synchronous rounds, ascending,
    and the rounds that their training stands for: this one, or those of `Federation.turns`."""
    size, novel = plan.cohort_size(federation), plan.cohort.novel
    if method.trains_alone:
        return federation.turns(number, plan.rounds, size, novel)
    clients = federation.cohort(number, size, novel, poisson=plan.privacy.is_poisson)
    return dict.fromkeys(clients, range(number, number + 1))


def usual_cohort(method: Method, federation: Federation, plan: Plan) -> tuple[int, ...]:
    """A cohort of the usual size, where chance may give a larger one or none."""
    plain = replace(plan, privacy=PrivacyConfig())
    return tuple(draw_cohort(method, federation, plain, 1))


def participants(
    federation: Federation, plan: Plan, number: int, clients: Mapping[int, range]
) -> Participants:
    """What becomes of ``clients``, ascending, that are sent the server's state after the round
    before round ``number``, each with the rounds that its training stands for."""
    members, dropped = list[Member](), list[int]()
    for client, rounds in clients.items():
        fate = plan.faults.fate(federation.seed, number, client)
        if fate.drops_before:
            dropped.append(client)
            continue
        steps = federation.num_steps(client, plan.local)
        steps = fate.steps(steps) if fate.share < 1 else steps
        scale, slope, drops = plan.lr_scale(rounds), plan.lr_slope(rounds), fate.drops_after
        members.append(Member(client, number - 1, steps, scale, drops, lr_slope=slope))
    return Participants(tuple(members), tuple(dropped))
