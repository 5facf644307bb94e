"""The one loop: send, train locally, aggregate, evaluate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from .. import random
from ..data.config import LocalConfig
from ..data.example_cache import ExampleCache
from ..data.federation import Federation
from ..errors import DivergedError, InputError
from ..method import Cohort, Method, Server
from ..params import Batch, Params, aligned, to_device
from ..profiling import Clock, phase
from ..robustness.faults import TimeModel
from ..task.task import Task
from .aggregation import (
    NextState,
    UploadMean,
    Uploads,
    empty_uploads,
    next_state,
    training_order,
)
from .asynchronous import brought_up_to_date, schedule
from .checks import check
from .client import ClientEvaluation, ClientUpdate, Training
from .client_store import ClientStore, PrivateStates
from .config import LEAST, EngineConfig, Plan
from .costs import Costs, count_flops
from .evaluation import Evaluator
from .executors.choose import executor_for
from .executors.counted import Counted
from .executors.work import ClientRequest, Executor, Refusal, Work, client_requests
from .malloc import keep_freed_memory
from .metrics import MetricFunction, Metrics
from .participants import Member, Schedule
from .results import CohortResults, RoundFaults, round_faults
from .scoring import Evaluation, Scoring
from .screen import Screen


@dataclass(frozen=True)
class Round:
    """What one round has done. ``losses`` and ``steps`` have one entry a cohort member; bytes are
    those of the whole cohort. ``diagnostics`` are the method's, after an evaluation:
    ``server/NAME`` (where they are by client, those of ``server_clients``) and ``client/NAME``
    ``[n, ...]`` of ``clients``. ``notes`` say in words which clients it went on without, and why.

    Round 0, of a run that goes on from another one's states, has evaluations alone: nobody takes
    part, and nothing is sent. Nobody is in the cohort of a round that comes to nothing, either.
    ``cpu_seconds`` is the processor time of the clients' training, None where it is not known."""

    number: int
    server: Server
    cohort: Cohort
    losses: tuple[float, ...]
    steps: tuple[int, ...]
    lr_scale: float
    bytes_down: int
    bytes_up: int
    costs: Costs | None  # None if nobody has trained
    evaluations: tuple[Evaluation, ...]
    diagnostics: Params
    seconds: dict[str, float]
    executor: str | None  # what the clients were run by; None: `auto` has not chosen yet
    notes: tuple[str, ...] = ()
    cpu_seconds: float | None = None
    norms: tuple[float, ...] = ()  # of the members' uploads; empty where there is no bound on them
    faults: RoundFaults | None = None  # None: none are simulated

    @property
    def train_loss(self) -> float | None:
        """The mean training loss over the cohort; None if nobody is in it."""
        return sum(self.losses) / len(self.losses) if self.losses else None


def new_store(
    method: Method, task: Task, federation: Federation, path: Path | None = None
) -> ClientStore:
    """The store of a run's private states, in memory or at ``path``."""

    def initial(client: int) -> Params:
        key = random.key(federation.seed, "client", client)
        return aligned(method.init_client(task, client, key))

    return ClientStore(federation.num_clients, initial, path)


def first_server(method: Method, task: Task, federation: Federation) -> Server:
    """The server's state before the first round."""
    key = random.key(federation.seed, "server")
    return aligned(method.init_server(task, federation.num_clients, key))


def draw_cohort(federation: Federation, plan: Plan, number: int) -> Cohort:
    """Who takes part in round ``number``."""
    size = plan.cohort.count(federation.num_clients - plan.cohort.novel)
    return _cohort(federation, number, federation.cohort(number, size, plan.cohort.novel))


def _cohort(federation: Federation, number: int, clients: tuple[int, ...]) -> Cohort:
    sizes = [federation.num_examples(client) for client in clients]
    key = random.key(federation.seed, number, "aggregate")
    num_examples = torch.tensor(sizes, dtype=torch.float64)
    return Cohort(clients, num_examples, number, key, federation.num_clients)


def rounds(
    method: Method,
    task: Task,
    federation: Federation,
    plan: Plan,
    *,
    store: PrivateStates | None = None,
    server: Server | None = None,
    recent_norms: Sequence[Sequence[float]] = (),
    start: int = 1,
    earlier: Callable[[int], Server | None] | None = None,
    executor: str | None = None,
    make_executor: Callable[[Mapping[str, Work]], Executor] | None = None,
    quorum: float = 1.0,
    on_result: Callable[[str, int], None] | None = None,
    metrics: Mapping[str, MetricFunction] | None = None,
) -> Iterator[Round]:
    """Run ``plan``, one `Round` at a time.

    The cohort's private states are staged in ``store`` when a round is handed out, and committed
    when the next one is asked for: the caller can make the round durable in between.

    Args:
        method, task, federation, plan: what to run.
        store: the clients' private states; None: new ones, in memory. To resume a run, the store as
            it was after the last round.
        server: the server's state after the last round; None: its first state.
        recent_norms: to resume a run, the ``norms`` of its last ten rounds.
        start: the number of the first round to run. 0: ``server`` and what is staged in ``store``
            are evaluated before round 1, and handed out as round 0.
        earlier: to resume asynchronous rounds, the server's state after an earlier round; None for
            its first state.
        executor: to resume a run, the executor that its last round names.
        make_executor: makes what runs the clients' work, instead of what ``plan.engine`` says.
        quorum: the part of a cohort whose updates must be usable, from 0 to 1. The clients without
            such an update leave the cohort before anything is weighted.
        on_result: called after each result of a round's work, with the name of the work ("train",
            "evaluate", "score") and the number of results so far.
        metrics: functions for names in ``plan.evaluate.metrics``.

    Raises:
        InputError: a client has no data, the method's settings don't fit, too few updates are
            usable (DivergedError: because losses or tensors are not finite).
        ChildProcessError: a process that clients are run in has died.
    """
    keep_freed_memory()
    federation.check()
    check(method, task, federation, plan)
    wanted = Metrics(plan.evaluate, metrics or {})
    wanted.check(federation.dataset.task, remote=federation.remote)
    store = store or new_store(method, task, federation)
    if server is None:
        server = first_server(method, task, federation)
    server = to_device(server, task.device)
    if plan.engine.on_divergence == "skip":
        quorum = min(quorum, LEAST)
    time = time_model(method, task, federation, plan)
    federation = with_example_cache(method, task, federation, plan.engine)
    works = client_works(method, task, federation, plan, metrics)
    if make_executor is not None:
        runner = make_executor(works)
    else:
        size = plan.cohort.count(federation.num_clients - plan.cohort.novel)
        runner = executor_for(plan.engine, works, task.device, size, executor)
    if on_result is not None:
        runner = Counted(runner, on_result)
    trigger = plan.trigger(federation)
    evaluator = Evaluator(method, task, federation, plan, store, runner, wanted, trigger)
    participants, versions = schedule(federation, plan, time, start)
    loop = _Loop(
        method, task, federation, plan, store, runner, evaluator, quorum, participants, time
    )
    loop.screen.recent_norms = recent_norms
    for version in versions:
        state = earlier(version) if earlier is not None else None
        state = first_server(method, task, federation) if state is None else state
        loop.versions[version] = to_device(state, task.device)
    try:
        for number in range(start, plan.rounds + 1):
            done = loop.round(server, number) if number else loop.before(server)
            server = done.server
            yield done
            store.commit()
    finally:
        runner.close()


def time_model(method: Method, task: Task, federation: Federation, plan: Plan) -> TimeModel | None:
    """How long clients need, measured on the `first_step`; None if time is not simulated."""
    faults = plan.faults
    if not faults.machines:
        return None
    costs = first_costs(method, task, federation, plan)
    assert costs.flops is not None
    kinds = faults.kinds(federation.seed, federation.num_clients)
    down, up = sum(costs.down.values()), sum(costs.up.values())
    return TimeModel(faults.machines, kinds, costs.flops, down, up)


def first_step(
    method: Method, task: Task, federation: Federation, plan: Plan
) -> tuple[dict[str, Work], Server, ClientRequest]:
    """The first client's training of round 1 on a single batch: the works, the server's state, and
    the request to the client."""
    plan = replace(plan, local=LocalConfig(plan.local.batch_size, steps=1))
    client = draw_cohort(federation, plan, 1).clients[0]
    private = new_store(method, task, federation).read(client)
    scale = plan.schedule.factor(1, plan.rounds)
    request = ClientRequest(0, client, 1, private, "train", 1, scale, 1)
    server = to_device(first_server(method, task, federation), task.device)
    return client_works(method, task, federation, plan), server, request


def first_costs(method: Method, task: Task, federation: Federation, plan: Plan) -> Costs:
    """The costs of the `first_step`, its floating-point operations included. What is computed once
    for each example is not counted."""
    federation = with_example_cache(method, task, federation, plan.engine)
    works, server, request = first_step(method, task, federation, plan)
    train = works["train"]
    assert isinstance(train, Training)
    inputs = train.prepare(server, request)
    updates: list[ClientUpdate] = []
    flops = count_flops(lambda: updates.append(train.complete(request, inputs)))
    return replace(updates[0].costs, flops=flops)


def client_works(
    method: Method,
    task: Task,
    federation: Federation,
    plan: Plan,
    metrics: Mapping[str, MetricFunction] | None = None,
) -> dict[str, Work]:
    """What an executor is asked to do, by name; ``metrics`` as in `rounds`."""
    wanted = Metrics(plan.evaluate, metrics or {})
    public = public_batch(federation, task) if method.needs_public else None
    context, trigger = (method, task, federation), plan.trigger(federation)
    attack = plan.attack, plan.attackers(federation), trigger
    return {
        "train": Training(*context, plan.local, public, *attack),
        "evaluate": ClientEvaluation(
            *context, plan.local, public, plan.evaluate.batch_size, wanted, trigger
        ),
        "score": Scoring(*context, wanted, trigger),
    }


def public_batch(federation: Federation, task: Task) -> Batch:
    """The examples that everybody has."""
    assert federation.public is not None
    rows = np.arange(federation.public.num_train)
    return to_device(federation.public.batch(rows), task.device)


def with_example_cache(
    method: Method, task: Task, federation: Federation, engine: EngineConfig
) -> Federation:
    """``federation``, with what the method works out once an example, if it fits into memory."""
    if engine.cache_mb == 0 or federation.remote:
        return federation

    def compute(batch: Batch) -> Params:
        return method.precompute(task, to_device(batch, task.device))

    first = int(federation.partition.train.sizes().argmax())  # client 0's may be elsewhere
    if not compute(federation.dataset.batch(federation.partition.train[first][:1])):
        return federation
    cache = ExampleCache(compute, federation.dataset, federation.partition.rows)
    return replace(federation, example_cache=cache) if cache.fits(engine.cache_mb) else federation


@dataclass
class _Loop:
    method: Method
    task: Task
    federation: Federation
    plan: Plan
    store: PrivateStates
    executor: Executor
    evaluator: Evaluator
    quorum: float
    schedule: Schedule
    time: TimeModel | None
    versions: dict[int, Server] = field(default_factory=dict)  # that clients in flight were sent

    def __post_init__(self) -> None:
        self.screen = Screen(self.method, self.task, self.federation, self.plan)

    def before(self, server: Server) -> Round:
        """Evaluate the states that the run begins with."""
        clock = Clock()
        with clock.phase("evaluate"):
            evaluations, diagnostics = self.evaluator.evaluate(server, 0)
        none = torch.zeros(0, dtype=torch.float64)
        key = random.key(self.federation.seed, 0, "aggregate")
        return Round(
            number=0,
            server=server,
            cohort=Cohort((), none, 0, key, self.federation.num_clients),
            losses=(),
            steps=(),
            lr_scale=0.0,
            bytes_down=0,
            bytes_up=0,
            costs=None,
            evaluations=tuple(evaluations),
            diagnostics=diagnostics,
            seconds=clock.seconds,
            executor=self.executor.name,
        )

    def round(self, server: Server, number: int) -> Round:
        """Train a cohort from ``server``, aggregate, stage the private states, evaluate."""
        plan, federation, clock = self.plan, self.federation, Clock()
        self.versions[number - 1] = server
        drawn = self.schedule.next_round()
        counted = [drawn.members[at] for at in drawn.counted]
        cohort = _cohort(federation, number, tuple(member.client for member in counted))
        if number < plan.rounds and plan.cohort.buffer is None:
            self.store.prefetch(draw_cohort(federation, plan, number + 1).clients)
        self.store.begin(number)
        results, state = self._next(server, cohort, drawn.members, clock)
        server, present = state.server, state.present
        self.versions = {version: self.versions[version] for version in drawn.versions}
        notes = self._notes(cohort, results, state)
        if len(present) < len(cohort.clients):
            cohort = cohort.subset(torch.tensor(present, dtype=torch.int64))
        norms = self.screen.close(cohort)
        self.evaluator.forget([member.client for member in drawn.members])
        with clock.phase("evaluate"):
            due = plan.evaluate.due(number, plan.rounds)
            evaluations, diagnostics = self.evaluator.evaluate(server, number) if due else ([], {})
        return Round(
            number=number,
            server=server,
            cohort=cohort,
            losses=tuple(results.losses[at] for at in present),
            steps=tuple(counted[at].steps for at in present),
            lr_scale=plan.schedule.factor(number, plan.rounds),
            bytes_down=results.bytes_down,
            bytes_up=results.bytes_up,
            costs=results.costs,
            evaluations=tuple(evaluations),
            diagnostics=diagnostics,
            seconds=clock.seconds,
            executor=self.executor.name,
            notes=notes,
            cpu_seconds=results.cpu_seconds if results.cpu_seconds or not drawn.members else None,
            norms=norms,
            faults=round_faults(plan, drawn, results, [counted[at] for at in present], number),
        )

    def _next(
        self, server: Server, cohort: Cohort, members: Sequence[Member], clock: Clock
    ) -> tuple[CohortResults, NextState]:
        """Train the members and aggregate the uploads that count, those of the cohort; they are
        forgotten with that.

        Raises:
            InputError: too few updates are usable (DivergedError: because they, or the server's
                next state, are not finite).
        """
        complete = self.complete and self.plan.faults.deadline is None
        uploads = self._empty(cohort, members, complete and self.plan.cohort.refuses_rarely)
        with clock.phase("train"):
            results = self._train(server, cohort, members, uploads)
        clock.move(results.data_seconds / self.executor.processes, "train", "data")
        if cohort.clients:
            self._check_quorum(results, cohort)
        if isinstance(uploads, UploadMean) and not uploads.keeps and self.screen.above():
            # what has been added up can't be taken out again
            self.store.begin(cohort.round)
            uploads = self._empty(cohort, members, complete=False)
            with clock.phase("train"):
                results = self._train(server, cohort, members, uploads)
        if (problem := self._too_few(len(results.losses))) is not None:
            note = f"{problem}; the server's state stays as it is"
            return results, NextState(server, (), {}, (note,))
        with clock.phase("aggregate"):
            least, max_share = self._least(cohort), self.plan.cohort.max_share
            context = self.method, self.task, server, uploads, cohort
            try:
                state = next_state(
                    *context,
                    sorted(results.losses),
                    least=least,
                    max_share=max_share,
                    screen=self.screen,
                )
            except DivergedError as error:
                self.store.begin(cohort.round)  # nothing of the round is kept
                raise self._diverged(str(error), cohort) from None
        for position in state.left_out:
            self.store.unstage(cohort.clients[position])
        return results, state

    def _too_few(self, present: int) -> str | None:
        """Why so few uploads can't be aggregated, where simulated faults may have lost the others;
        None: they can."""
        if not self.plan.faults.is_active:
            return None
        if present == 0:
            return "no upload is there"
        try:
            self.method.robust.among(present)
        except InputError as error:
            return str(error)
        return None

    def _empty(self, cohort: Cohort, members: Sequence[Member], complete: bool) -> Uploads:
        return empty_uploads(
            self.method,
            cohort,
            [member.steps for member in members if member.counts],
            self.plan,
            complete=complete,
            attacked=self.plan.attack.on_uploads,
        )

    def _notes(self, cohort: Cohort, results: CohortResults, state: NextState) -> tuple[str, ...]:
        """Which clients a round has gone on without, and why. What a remote executor has refused,
        it has said itself."""
        reasons = {} if self.federation.remote else results.reasons
        reasons |= {
            cohort.clients[at]: f"with its upload, {reason}"
            for at, reason in state.left_out.items()
        }
        name = self.federation.name
        reasons |= {
            client: f"its upload came after {seconds:.6g} simulated seconds"
            for client, seconds in results.late.items()
        }
        without = (f"without client {name(k)}: {reasons[k]}" for k in sorted(reasons))
        return (*without, *state.notes)

    def _train(
        self, server: Server, cohort: Cohort, members: Sequence[Member], uploads: Uploads
    ) -> CohortResults:
        """Train the members; those that were sent an older state go first."""
        results = CohortResults()
        self.screen.begin(server)
        order = [members[at] for at in training_order([member.steps for member in members])]
        places = {member.client: place for place, member in enumerate(order)}
        positions = {client: position for position, client in enumerate(cohort.clients)}
        for version in sorted({member.version for member in members}):
            sent = self.versions[version]
            requests = self._requests([one for one in order if one.version == version], version)
            for request, result in self.executor.map("train", sent, requests):
                place, client = places[request.client], request.client
                refusal = result if isinstance(result, Refusal) else result.refusal
                if refusal is not None:
                    results.refusals[place] = client, refusal
                    continue
                member, position = order[place], positions.get(client)
                if self._is_late(results, member, result):
                    position = None
                results.add(place, position, result, sends=not member.drops)
                if cohort.clients and self._most_usable(results, cohort) < self._least(cohort):
                    continue  # the round comes to nothing: nothing of it is kept
                with phase("state"):
                    self.store.stage(client, result.private)
                    if position is None:
                        continue
                    upload = self.method.unpack(self.task, result.packed)
                    if (staleness := cohort.round - 1 - version) > 0:
                        upload = brought_up_to_date(
                            self.method, self.task, upload, sent, server, staleness
                        )
                    self.screen.measure(client, upload)
                    uploads.put(position, upload)
        return results

    def _requests(self, members: Sequence[Member], version: int) -> Iterator[ClientRequest]:
        """The requests to members that are sent the state after round ``version``."""
        requests = client_requests(
            [member.client for member in members],
            version + 1,
            "train",
            self.plan.local.passes,
            {member.client: member.steps for member in members},
            self.store.read,
            self.plan.schedule.factor(version + 1, self.plan.rounds),
        )
        return (replace(request, steps=request.size) for request in requests)

    def _is_late(self, results: CohortResults, member: Member, update: ClientUpdate) -> bool:
        """Whether a member's upload comes after the deadline of a synchronous round."""
        if self.time is None or self.plan.cohort.buffer is not None:
            return False
        down, up = sum(update.costs.down.values()), sum(update.costs.up.values())
        seconds = self.time.seconds(member.client, member.steps, down, 0 if member.drops else up)
        return results.is_late(member, seconds, self.plan.faults.deadline)

    def _most_usable(self, results: CohortResults, cohort: Cohort) -> int:
        """How many of the cohort's updates can be usable, as far as it is known."""
        refused = {client for client, _ in results.refusals.values()}
        return len(cohort.clients) - len(refused.intersection(cohort.clients))

    @property
    def complete(self) -> bool:
        """Whether every member of a cohort must have a usable update."""
        return self.quorum == 1

    def _least(self, cohort: Cohort) -> int:
        """How many updates must be usable."""
        return max(1, math.ceil(self.quorum * len(cohort.clients)))

    def _check_quorum(self, results: CohortResults, cohort: Cohort) -> None:
        """Raise where too few updates are usable: DivergedError if there would be enough without
        those that are not finite, else InputError."""
        usable, asked = len(results.losses) + len(results.late), len(cohort.clients)
        least = self._least(cohort)
        if usable >= least:
            return
        self.store.begin(cohort.round)  # nothing of the round is kept
        diverged = {
            place: refusal
            for place, (client, refusal) in results.refusals.items()
            if refusal.diverged and client in cohort.clients
        }
        if usable + len(diverged) >= least:
            raise self._diverged(diverged[min(diverged)].reason, cohort)
        raise InputError(
            f"round {cohort.round} of {self.method.name}: {usable} of {asked} clients sent a "
            f"usable update, {least} are needed; the same command goes on after round "
            f"{cohort.round - 1}"
        )

    def _diverged(self, reason: str, cohort: Cohort) -> DivergedError:
        return DivergedError(
            f"{reason} in round {cohort.round} of {self.method.name}; "
            "lower the learning rate or set optimiser.clip"
        )
