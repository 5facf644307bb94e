"""One round after the other: who trains, what of it counts, and the evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from ..data.federation import Federation, num_turns
from ..errors import DivergedError, InputError, NoiseSpentError, TooFewLeftError, TooFewUploadsError
from ..method import Cohort, Method, Server, checked_weights
from ..profiling import Clock, phase
from ..task.task import Task
from ..uploads.chain import Chain
from ..uploads.collected import UploadMean, Uploads, UploadStack, UploadSum
from ..uploads.secure.messages import Masks
from .aggregation import NextState, next_state, training_order
from .client import ClientUpdate
from .config import LEAST, Plan
from .evaluation import Evaluator
from .executors.work import ClientRequest, Executor, Map, Refusal
from .faults import TimeModel
from .participants import Member, Participants, Schedule, draw_cohort
from .prepare import cohort_of
from .private_states import PrivateStates
from .results import CohortResults, Round, round_faults

# what to do about a method that has ended, because of its losses, or of the bound on norms
_SLOWER = "lower the learning rate or set optimiser.clip"
_UNBOUNDED = "or bound what a client sends (cohort.above_norm)"
_HIGHER = "if the clients are honest, set a higher bound"


@dataclass
class Loop:
    """What runs the rounds of `rounds.rounds`, and what it keeps between them."""

    method: Method
    task: Task
    federation: Federation
    plan: Plan
    chain: Chain
    store: PrivateStates
    executor: Executor
    run: Map  # that of the executor
    evaluator: Evaluator
    quorum: float
    schedule: Schedule
    time: TimeModel | None
    on_aggregate: Callable[[Round], None] | None = None  # before anything of the round is sent
    resumed: Round | None = None  # what it was told of a round that was not evaluated
    versions: dict[int, Server] = field(default_factory=dict)  # that clients in flight were sent

    def before(self, server: Server) -> Round:
        """Evaluate the states that the run begins with."""
        clock = Clock()
        with clock.phase("evaluate"):
            evaluations, diagnostics, samples = self.evaluator.evaluate(server, 0)
        return Round(
            number=0,
            server=server,
            cohort=cohort_of(self.federation, 0, ()),
            evaluations=tuple(evaluations),
            diagnostics=diagnostics,
            seconds=clock.seconds,
            executor=self.executor.name,
            samples=samples,
        )

    def round(self, server: Server, number: int) -> Round:
        """Train a cohort from ``server``, aggregate, stage the private states, evaluate."""
        clock, account = Clock(), self.plan.account(self.federation)
        self.versions[number - 1] = server
        drawn = self.schedule(number)
        if self.resumed is not None and self.resumed.number == number:
            done = self.resumed
            self.store.begin(number)
            for client in done.cohort.clients:
                self.store.stage(client, None)
        else:
            done = self._aggregated(server, number, drawn, clock)
            if self.on_aggregate is not None:
                self.on_aggregate(done)
        self.versions = {version: self.versions[version] for version in drawn.versions}
        self.evaluator.forget([member.client for member in drawn.members])
        with clock.phase("evaluate"):
            due = self.plan.evaluate.due(number, self.plan.rounds) and self._all_began(number)
            found = self.evaluator.evaluate(done.server, number) if due else ([], {}, ())
        evaluations, diagnostics, samples = found
        return replace(
            done,
            evaluations=tuple(evaluations),
            diagnostics=diagnostics,
            samples=samples,
            seconds=clock.seconds,
            executor=self.executor.name,
            privacy=None if account is None else account.spent(number),
        )

    def _aggregated(self, server: Server, number: int, drawn: Participants, clock: Clock) -> Round:
        """The round of those who were ``drawn``, but for its evaluation and what it spends."""
        plan, federation = self.plan, self.federation
        counted = [member for member in drawn.members if member.counts]
        cohort = cohort_of(federation, number, tuple(member.client for member in counted))
        if number < plan.rounds and plan.cohort.buffer is None:
            self.store.prefetch(tuple(draw_cohort(self.method, federation, plan, number + 1)))
        self.store.begin(number)
        results, state = self._next(server, cohort, drawn, clock)
        present = state.present
        notes, clip = self._notes(results, state), self.chain.clip_now
        if len(present) < len(cohort.clients):
            cohort = cohort.subset(torch.tensor(present, dtype=torch.int64))
        norms = self.chain.close(cohort.clients)
        turns = [member.lr_scale for member in drawn.members if self.method.trains_alone]
        return Round(
            number=number,
            server=state.server,
            cohort=cohort,
            evaluations=(),
            diagnostics={},
            seconds={},
            losses=tuple(results.losses[at] for at in present),
            steps=tuple(counted[at].steps for at in present),
            lr_scale=max(turns, default=plan.lr_scale([number])),
            trained=results.trained,
            trained_steps=results.trained_steps,
            bytes_down=results.bytes_down,
            bytes_up=results.bytes_up,
            costs=results.costs,
            executor=None,
            notes=notes,
            cpu_seconds=results.cpu_seconds if results.cpu_seconds or not drawn.members else None,
            norms=norms,
            clip=clip,
            next_clip=self.chain.clip_now,
            faults=round_faults(plan, drawn, results, [counted[at] for at in present], number),
            unchanged=tuple(sorted(results.unchanged)),
        )

    def _next(
        self, server: Server, cohort: Cohort, drawn: Participants, clock: Clock
    ) -> tuple[CohortResults, NextState]:
        """Train the members of those ``drawn`` and aggregate the uploads that count, those of the
        cohort; they are forgotten with that. Raises InputError where too few updates are usable
        (DivergedError: because they, or the server's next state, are not finite)."""
        members = drawn.members
        try:
            masks = self._masks(cohort.round, members)
        except TooFewUploadsError as error:
            may_miss = self.plan.faults.is_active or self.plan.privacy.is_poisson
            if may_miss or isinstance(error, NoiseSpentError):
                return CohortResults(), _unchanged(server, str(error))
            raise InputError(f"{error}; {self._goes_on(cohort)}") from None
        while True:
            uploads = self._empty(cohort, members)
            with clock.phase("train"):
                results = self._train(server, cohort, members, uploads, masks)
            clock.move(results.data_seconds / self.executor.processes, "train", "data")
            if cohort.clients:
                self._check_quorum(results, cohort)
            if uploads.keeps or self.chain.needs == "sums":
                break
            self.store.discard()  # what has been added up can't be taken out again
        plan, alone = self.plan, self.method.trains_alone
        if not results.losses and (alone or plan.faults.is_active or plan.privacy.is_poisson):
            problem = "it is no client's turn" if alone else "no upload is there"
            return results, _unchanged(server, problem)
        with clock.phase("aggregate"):
            least, late = self._least(cohort, self.quorum), len(results.late)
            # one process does without uploads above the bound even where no update may be missing
            quorum = self.quorum if self.federation.remote else LEAST
            there = [cohort.clients[position] for position in sorted(results.losses)]
            at = self.chain.at(server, cohort.round, there)
            expected = plan.cohort.buffer or len(members) + len(drawn.dropped)
            at = replace(at, drawn=expected, least=self._least(cohort, quorum) - late)
            context = self.method, self.task, self.chain
            try:
                least = len(there) if self.chain.hidden else least - late  # a sum is used or not
                state = next_state(*context, uploads, cohort, at, least, plan.max_share)
            except TooFewUploadsError as error:
                for client in there:  # history.jsonl has nobody in such a round
                    self.store.unstage(client)
                return results, _unchanged(server, str(error))
            except DivergedError as error:
                way_out = _HIGHER if isinstance(error, TooFewLeftError) else _SLOWER
                raise self._diverged(str(error), cohort, way_out) from None
        for client in state.left_out:
            self.store.unstage(client)
        return results, state

    def _all_began(self, number: int) -> bool:
        """Whether each client of a method that trains alone has had its first turn."""
        plan, federation = self.plan, self.federation
        if not self.method.trains_alone:
            return True
        clients = federation.num_clients - plan.cohort.novel
        return num_turns(number, plan.rounds, plan.cohort_size(federation), clients) >= clients

    def _empty(self, cohort: Cohort, members: Sequence[Member]) -> Uploads:
        """The place for a cohort's uploads; weighed as they come where none may be missing."""
        plan, needs = self.plan, self.chain.needs
        if self.chain.hidden:
            return UploadSum()
        if not self.method.needs_only_mean or needs == "stack":
            return UploadStack(len(cohort.clients), plan.engine.upload_memory_mb * 1e6)
        order = training_order([member.steps for member in members if member.counts])
        if needs != "sums" or self.quorum < 1 or plan.faults.deadline is not None:
            return UploadMean(order)
        weighed = cohort.with_max_share(plan.max_share)
        return UploadMean(order, checked_weights(self.method, weighed))

    def _masks(self, number: int, members: Sequence[Member]) -> Mapping[int, Masks]:
        """What clients need whose uploads the server is not to see; empty where it may."""
        if not self.chain.hidden:
            return {}
        drawn = draw_cohort(self.method, self.federation, self.plan, number)
        present = [member.client for member in members]
        return self.chain.open(self.chain.at({}, number, tuple(drawn)), present)

    def _notes(self, results: CohortResults, state: NextState) -> tuple[str, ...]:
        """Which clients a round has gone on without, and why. What a remote executor has refused,
        it has said itself."""
        refused = [] if self.federation.remote else results.refusals.values()
        reasons = {client: refusal.reason for client, refusal in refused} | state.left_out
        name = self.federation.name
        reasons |= {
            client: f"its upload came after {seconds:.6g} simulated seconds"
            for client, seconds in results.late.items()
        }
        without = (f"without client {name(k)}: {reasons[k]}" for k in sorted(reasons))
        return (*without, *state.notes)

    def _train(
        self,
        server: Server,
        cohort: Cohort,
        members: Sequence[Member],
        uploads: Uploads,
        masks: Mapping[int, Masks],
    ) -> CohortResults:
        """Train the members; those that were sent an older state go first."""
        results, least = CohortResults(), self._least(cohort, self.quorum)
        order = [members[at] for at in training_order([member.steps for member in members])]
        places = {member.client: place for place, member in enumerate(order)}
        positions = {client: position for position, client in enumerate(cohort.clients)}
        for alike in sorted({member.like for member in members}):
            same = [one for one in order if one.like == alike]
            version, sent = same[0].version, self.versions[same[0].version]
            requests = self._requests(same, masks)
            for request, result in self.run("train", sent, requests):
                place, client = places[request.client], request.client
                refusal = result if isinstance(result, Refusal) else result.refusal
                member, position = order[place], positions.get(client)
                if isinstance(result, ClientUpdate) and result.unchanged:
                    results.unchanged.append(client)
                if refusal is not None:
                    results.refusals[place] = client, refusal
                    if isinstance(result, ClientUpdate):  # it has trained, and sends nothing
                        self._is_late(results, member, result, sends=False)
                        results.add(place, None, member.steps, result, sends=False)
                    continue
                if self._is_late(results, member, result, sends=not member.drops):
                    position = None
                results.add(place, position, member.steps, result, sends=not member.drops)
                refused = {one for one, _ in results.refusals.values()}
                if positions and len(positions.keys() - refused) < least:
                    continue  # the round comes to nothing: nothing of it is kept
                with phase("state"):
                    self.store.stage(client, result.private)
                    if position is None:
                        continue
                    at = self.chain.at(server, cohort.round, [client])
                    stale = cohort.round - 1 - version
                    at = replace(at, sent=sent, staleness=stale, kept=result.kept)
                    upload = self.chain.receive(result.packed, at)
                    if not uploads.keeps:
                        self.chain.watch(upload, at)
                    uploads.put(position, upload)
        return results

    def _requests(
        self, members: Sequence[Member], masks: Mapping[int, Masks]
    ) -> Iterator[ClientRequest]:
        """The requests to members; a private state is read when its request is made."""
        for member in members:
            yield ClientRequest(
                member.client,
                member.version + 1,
                self.store.read(member.client),
                "train",
                self.plan.local.passes,
                member.lr_scale,
                size=member.steps,
                steps=member.steps,
                lr_slope=member.lr_slope,
                masks=masks.get(member.client),
                clip=self.chain.clip_now,
            )

    def _is_late(
        self, results: CohortResults, member: Member, update: ClientUpdate, *, sends: bool
    ) -> bool:
        """Add the simulated time of a member; whether it ``sends`` an upload after the deadline."""
        if self.time is None or self.plan.cohort.buffer is not None:
            return False
        down, up = sum(update.costs.down.values()), sum(update.costs.up.values())
        seconds = self.time.seconds(member.client, member.steps, down, up if sends else 0)
        results.seconds = max(results.seconds, seconds)
        deadline = self.plan.faults.deadline
        if not sends or deadline is None or seconds <= deadline:
            return False
        results.late[member.client] = seconds
        return True

    def _least(self, cohort: Cohort, quorum: float) -> int:
        """How many updates must be usable, of the cohort's: who drops out is not in it."""
        return max(1, math.ceil(quorum * len(cohort.clients)))

    def _check_quorum(self, results: CohortResults, cohort: Cohort) -> None:
        """Raise where too few updates are usable: DivergedError if only for those not finite."""
        usable, asked = len(results.losses) + len(results.late), len(cohort.clients)
        least = self._least(cohort, self.quorum)
        if usable >= least:
            return
        diverged = {
            place: refusal
            for place, (client, refusal) in results.refusals.items()
            if refusal.diverged and client in cohort.clients
        }
        if usable + len(diverged) >= least:
            raise self._diverged(diverged[min(diverged)].reason, cohort, _SLOWER)
        lasts = any(refusal.lasts for _, refusal in results.refusals.values())
        why, again = "", "" if lasts else f"; {self._goes_on(cohort)}"
        if results.refusals and not self.federation.remote:  # what these have said was printed
            client, refusal = results.refusals[min(results.refusals)]
            why = f" (client {self.federation.name(client)}: {refusal.reason})"
        raise InputError(
            f"round {cohort.round} of {self.method.name}: {usable} of {asked} clients sent a "
            f"usable update{why}, {least} are needed{again}"
        )

    def _goes_on(self, cohort: Cohort) -> str:
        return f"the same command goes on after round {cohort.round - 1}"

    def _diverged(self, reason: str, cohort: Cohort, way_out: str) -> DivergedError:
        keeps = self.plan.cohort.above_norm == "keep" and not self.chain.hidden
        if way_out == _SLOWER and keeps:
            way_out = f"{_SLOWER}, {_UNBOUNDED}"
        return DivergedError(f"{reason} in round {cohort.round} of {self.method.name}; {way_out}")


def _unchanged(server: Server, problem: str) -> NextState:
    """What a round leaves that has no uploads to aggregate."""
    return NextState(server, (), {}, (f"{problem}; the server's state stays as it is",))
