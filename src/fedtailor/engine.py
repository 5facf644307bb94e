"""The one loop: send, train locally, aggregate, evaluate."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from . import random
from .client import client_round
from .costs import Costs, measure, wire_bytes
from .errors import DivergedError, InputError
from .evaluation import Evaluation, evaluate_each, evaluate_one
from .executors import EngineConfig, Job, UploadStack, execute
from .federation import Federation
from .method import Cohort, Method, Server
from .optim import Context
from .params import Params, prefixed, same_tensors, stack
from .plan import Plan
from .precomputed import Precomputed
from .store import Store
from .task import Batch, Task

_OBSERVED = 64  # validation examples of a client that a method is shown for its figures


@dataclass(frozen=True)
class Round:
    """What one round has done. ``losses`` and ``steps`` have one entry a cohort member; bytes are
    those of the whole cohort. ``observed`` is what the method shows of its states, after an
    evaluation: ``server/NAME`` (by client: those of ``server_clients``) and ``client/NAME``
    ``[n, ...]`` of ``clients``."""

    number: int
    server: Server
    cohort: Cohort
    losses: tuple[float, ...]
    steps: tuple[int, ...]
    lr_scale: float
    bytes_down: int
    bytes_up: int
    costs: Costs
    evaluations: tuple[Evaluation, ...]
    observed: Params
    seconds: dict[str, float]


def new_store(
    method: Method, task: Task, federation: Federation, path: Path | None = None
) -> Store:
    """The store of a run's private states, in memory or at ``path``."""

    def initial(client: int) -> Params:
        return method.init_client(task, client, random.key(federation.seed, "client", client))

    return Store(federation.num_clients, initial, path)


def check(method: Method, task: Task, federation: Federation, plan: Plan) -> None:
    """Raise InputError where the method, its settings and the federation don't go together."""
    taking_part = federation.num_clients - plan.cohort.novel
    if taking_part < 1:
        raise InputError(
            f"cohort.novel = {plan.cohort.novel} leaves none of {federation.num_clients} clients "
            f"to take part; allowed: 0 to {federation.num_clients - 1}"
        )
    cohort_size = plan.cohort.count(taking_part)
    method.robust.check(cohort_size)
    if method.needs_public and federation.public is None:
        raise InputError(f"{method.name} needs public examples; name a data set in [public]")
    if method.needs_public_labels:
        _check_public_labels(method, federation)
    method.check(task, federation.num_clients, cohort_size, plan.rounds)


def _check_public_labels(method: Method, federation: Federation) -> None:
    public, own = federation.public, federation.dataset
    there = () if public is None or public.labels is None else public.classes
    if not there or list(there) != list(own.classes):
        raise InputError(
            f"{method.name} as configured trains on the public examples' labels: their classes "
            f"({_listed(there)}) must be the clients' ({_listed(own.classes)})"
        )


def _listed(classes: Sequence[str]) -> str:
    more = f", ... {len(classes)} in all" if len(classes) > 5 else ""
    return ", ".join(classes[:5]) + more if classes else "none"


def rounds(
    method: Method,
    task: Task,
    federation: Federation,
    plan: Plan,
    *,
    store: Store | None = None,
    server: Server | None = None,
    start: int = 1,
) -> Iterator[Round]:
    """Run ``plan``, one `Round` at a time.

    The cohort's private states are staged in ``store`` when a round is handed out, and committed
    when the next one is asked for: the caller can make the round durable in between. To resume,
    give ``store`` and ``server`` as they were and ``start``, the first round to run.

    Raises:
        InputError: a client has no data, the method's settings don't fit, or a loss is not finite.
    """
    federation.check()
    check(method, task, federation, plan)
    store = store or new_store(method, task, federation)
    if server is None:
        key = random.key(federation.seed, "server")
        server = method.init_server(task, federation.num_clients, key)
    server = _to(server, task.device)
    federation = _with_precomputed(method, task, federation, plan.engine)
    public = _public(federation, task) if method.needs_public else None
    simulation = _Simulation(method, task, federation, plan, store, public)
    for number in range(start, plan.rounds + 1):
        done = simulation.round(server, number)
        server = done.server
        yield done
        store.commit()


def _public(federation: Federation, task: Task) -> Batch:
    assert federation.public is not None
    rows = np.arange(federation.public.num_train)
    return _to(federation.public.batch(rows), task.device)


def _with_precomputed(
    method: Method, task: Task, federation: Federation, engine: EngineConfig
) -> Federation:
    if engine.cache_mb == 0:
        return federation

    def compute(batch: Batch) -> Params:
        return method.precompute(task, _to(batch, task.device))

    if not compute(federation.dataset.batch(federation.partition.train[0][:1])):
        return federation
    precomputed = Precomputed(compute, federation.dataset, federation.partition.rows)
    fits = precomputed.fits(engine.cache_mb)
    return replace(federation, precomputed=precomputed) if fits else federation


@dataclass(frozen=True)
class _Simulation:
    method: Method
    task: Task
    federation: Federation
    plan: Plan
    store: Store
    public: Batch | None

    def round(self, server: Server, number: int) -> Round:
        """Train a cohort from ``server``, aggregate, stage the private states, evaluate."""
        plan, federation, clock = self.plan, self.federation, _Clock()
        novel = plan.cohort.novel
        size = plan.cohort.count(federation.num_clients - novel)
        clients = federation.cohort(number, size, novel)
        if number < plan.rounds:
            self.store.expect(federation.cohort(number + 1, size, novel))
        sizes = [federation.num_examples(client) for client in clients]
        key = random.key(federation.seed, number, "aggregate")
        cohort = Cohort(clients, torch.tensor(sizes, dtype=torch.float64), number, key)
        steps = [federation.num_steps(client, plan.local) for client in clients]
        trained = _Trained([{}] * len(clients), [math.nan] * len(clients))
        with tempfile.TemporaryDirectory(prefix="fedtailor-") as folder:
            limit = plan.engine.upload_memory_mb * 1e6
            uploads = UploadStack(len(clients), limit, folder)
            with clock.phase("train"):
                self._train(server, cohort, steps, uploads, trained, clock)
            with clock.phase("aggregate"):
                server = self._aggregate(server, uploads.params, cohort)
        self.store.stage(clients, trained.private)
        with clock.phase("evaluate"):
            due = plan.evaluate.due(number, plan.rounds)
            evaluations, observed = self._evaluate(server, number) if due else ([], {})
        assert trained.costs is not None
        return Round(
            number=number,
            server=server,
            cohort=cohort,
            losses=tuple(trained.losses),
            steps=tuple(steps),
            lr_scale=plan.schedule.factor(number, plan.rounds),
            bytes_down=trained.bytes_down,
            bytes_up=trained.bytes_up,
            costs=trained.costs,
            evaluations=tuple(evaluations),
            observed=observed,
            seconds=clock.seconds,
        )

    def _aggregate(self, server: Server, uploads: Params, cohort: Cohort) -> Server:
        """On the uploads' device: the task's, or the CPU for those on disk."""
        device = next((value.device for value in uploads.values()), self.task.device)
        # running statistics would drown what clients ask for: they are far larger than updates
        scored = {name: v for name, v in uploads.items() if name not in self.task.buffers}
        rows = self.method.robust.select(scored)
        if rows is not None:
            uploads = {name: value[rows] for name, value in uploads.items()}
            cohort = cohort.only(rows)
        server = self.method.aggregate(self.task, _to(server, device), uploads, cohort)
        return _to(server, self.task.device)

    def _train(
        self,
        server: Server,
        cohort: Cohort,
        steps: Sequence[int],
        uploads: UploadStack,
        trained: _Trained,
        clock: _Clock,
    ) -> None:
        # clients of equal length run together: less padding, the same numbers
        order = sorted(range(len(steps)), key=lambda at: (steps[at], at))
        jobs = self._jobs(
            server, cohort.clients, order, cohort.round, "train", 1, clock, self.store.read
        )
        work = partial(client_round, self.method, self.task)
        for job, (upload, private, loss) in execute(self.plan.engine, work, jobs):
            self._check(loss, upload, private, cohort, job.position)
            trained.losses[job.position] = loss.item()
            trained.private[job.position] = {n: v.cpu() for n, v in private.items()}
            packed = self.method.pack(self.task, upload)
            uploads.put(job.position, self.method.unpack(self.task, packed))
            trained.bytes_down += sum(wire_bytes(job.received).values())
            trained.bytes_up += sum(wire_bytes(packed).values())
            if trained.costs is None:
                trained.costs = measure(self.task, job.received, private, packed)

    def _jobs(
        self,
        server: Server,
        clients: Sequence[int],
        order: Sequence[int],
        number: int,
        purpose: str,
        passes: int,
        clock: _Clock,
        private: Callable[[int], Params],
    ) -> Iterator[Job]:
        device = self.task.device
        training = purpose == "train"
        scale = self.plan.schedule.factor(number, self.plan.rounds) if training else 1.0
        for position in order:
            client = clients[position]
            with clock.phase("data", inside="train"):
                batches = self.federation.steps(
                    client, number, self.plan.local, purpose=purpose, passes=passes
                )
                key = random.key(self.federation.seed, number, client, purpose)
                job = Job(
                    position,
                    self.method.send(self.task, server, client),
                    _to(private(client), device),
                    [_to(batch, device) for batch in batches],
                    Context(key.to(device), scale, number, self.public),
                )
            yield job

    def _check(
        self, loss: Tensor, upload: Params, private: Params, cohort: Cohort, position: int
    ) -> None:
        wrong = None if loss.isfinite() else f"the loss of client {{}} is {loss.item()}"
        for name, value in {**private, **upload}.items():
            if wrong is None and not value.isfinite().all():
                wrong = f"client {{}} has trained {name} to values that are not finite"
        if wrong is not None:
            raise DivergedError(
                f"{wrong.format(cohort.clients[position])} in round {cohort.round} of "
                f"{self.method.name}; lower the learning rate or set optimiser.clip"
            )

    def _evaluate(self, server: Server, number: int) -> tuple[list[Evaluation], Params]:
        config, method = self.plan.evaluate, self.method
        novel = self.federation.novel(self.plan.cohort.novel)
        clients = self.federation.evaluation_clients(config.clients, self.plan.cohort.novel)
        shared = method.global_state(self.task, server)
        # with nothing private, nothing personal in what is sent and no fine-tuning: one model
        single = (
            shared is not None
            and not self.store.has_states
            and method.personal_passes == 0
            and all(same_tensors(method.send(self.task, server, k), shared) for k in clients)
        )
        watch = _Watch(method, self.task, self.federation)
        found: list[Evaluation] = []
        if shared is not None and (single or config.global_model):
            found += evaluate_one(
                method, self.task, self.federation, shared, clients, config.batch_size
            )
        if shared is not None and single:
            personal = [replace(evaluation, model="personal") for evaluation in found]
            for client in clients:
                watch(client, shared)
        else:
            states = self._personal_states(server, clients, number, self.store.read)
            personal = self._each(watch.each(states))
        if novel:
            joined = self._joined(server, sorted(novel), number)
            states = self._personal_states(server, sorted(novel), number, joined.__getitem__)
            personal += [replace(evaluation, model="novel") for evaluation in self._each(states)]
        return personal + (found if config.global_model else []), watch.observed(server, clients)

    def _each(self, states: Iterator[tuple[int, Params]]) -> list[Evaluation]:
        return evaluate_each(
            self.method, self.task, self.federation, states, self.plan.evaluate.batch_size
        )

    def _joined(self, server: Server, clients: Sequence[int], number: int) -> dict[int, Params]:
        """The private states of clients that have just joined: trained for a few passes, of which
        nothing is sent."""
        passes = self.plan.evaluate.novel_passes
        if not self.store.has_states or passes == 0:
            return {client: self.store.read(client) for client in clients}
        order = range(len(clients))
        jobs = self._jobs(server, clients, order, number, "join", passes, _Clock(), self.store.read)
        work = partial(client_round, self.method, self.task)
        done = execute(self.plan.engine, work, jobs)
        return {clients[job.position]: private for job, (_, private, _) in done}

    def _personal_states(
        self,
        server: Server,
        clients: Sequence[int],
        number: int,
        private: Callable[[int], Params],
    ) -> Iterator[tuple[int, Params]]:
        """(client, the state it uses), fine-tuned where the method does that."""
        if self.method.personal_passes == 0:
            for client in clients:
                own = _to(private(client), self.task.device)
                yield client, {**self.method.send(self.task, server, client), **own}
            return

        def work(
            received: Params, private: Params, steps: Sequence[Batch], context: Context
        ) -> Params:
            return self.method.personalise(self.task, {**received, **private}, steps, context)

        passes = self.method.personal_passes
        steps = [self.federation.num_steps(client, self.plan.local, passes) for client in clients]
        order = sorted(range(len(clients)), key=lambda at: (steps[at], at))
        jobs = self._jobs(server, clients, order, number, "personalise", passes, _Clock(), private)
        for job, state in execute(self.plan.engine, work, jobs):
            yield clients[job.position], state


class _Watch:
    """What a method shows of its states, gathered while they are evaluated."""

    def __init__(self, method: Method, task: Task, federation: Federation) -> None:
        self._method, self._task, self._federation = method, task, federation
        self._seen: dict[int, Params] = {}
        self._idle = False  # once a client has nothing to show

    def __call__(self, client: int, state: Params) -> None:
        rows = self._federation.rows(client, "validation")[:_OBSERVED]
        if self._idle or not len(rows):
            return
        batch = _to(self._federation.batch(rows), self._task.device)
        with torch.no_grad():
            seen = self._method.observe_client(self._task, state, batch)
        self._seen[client] = {name: value.cpu() for name, value in seen.items()}
        self._idle = not seen

    def each(self, states: Iterator[tuple[int, Params]]) -> Iterator[tuple[int, Params]]:
        for client, state in states:
            self(client, state)
            yield client, state

    def observed(self, server: Server, clients: Sequence[int]) -> Params:
        """By client where a client showed it; ``clients`` and ``server_clients`` say whose."""
        shown = self._method.observe_server(self._task, server, clients)
        found = {f"server/{name}": value.cpu() for name, value in shown.items()}
        if self._seen and not self._idle:
            order = sorted(self._seen)
            found |= prefixed(stack([self._seen[client] for client in order]), "client/")
            found["clients"] = torch.tensor(order)
        if shown:
            found["server_clients"] = torch.tensor(list(clients))
        return found


@dataclass
class _Trained:
    """What comes back from a cohort, by position."""

    private: list[Params]
    losses: list[float]
    bytes_down: int = 0
    bytes_up: int = 0
    costs: Costs | None = None


@dataclass
class _Clock:
    """Seconds by phase."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str, inside: str | None = None) -> Iterator[None]:
        """Add the time spent in the block to ``name``, and take it off ``inside``."""
        start = time.perf_counter()
        yield
        spent = time.perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + spent
        if inside is not None:
            self.seconds[inside] = self.seconds.get(inside, 0.0) - spent


def _to(tensors: Params | Batch, device: torch.device) -> Params:
    return {name: value.to(device) for name, value in tensors.items()}
