"""What a run begins with: states, cohorts, what clients are asked to do, and what a step costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from .. import random
from ..data.config import LocalConfig
from ..data.example_cache import ExampleCache
from ..data.federation import Federation
from ..data.table import Dataset, Images, Ragged, Tokens
from ..errors import InputError
from ..method import Cohort, Method, Server, checked_weights
from ..objectives.objective import MetricFunction
from ..optim import ClientContext
from ..params import Batch, Params, aligned, to_device
from ..task.task import Task
from ..torch_private import count_flops
from ..uploads.accounting import Account
from ..uploads.attacks import Attack
from ..uploads.chain import Chain, Link, Packing, UploadContext
from ..uploads.norms import NormBound
from ..uploads.private import Private
from ..uploads.record_accounting import RecordAccount
from ..uploads.robust import RobustRule
from ..uploads.secure.messages import Clients, Weighing
from ..uploads.staleness import Staleness
from .backdoor import Trigger
from .client import ClientEvaluation, ClientUpdate, StepNoise, Training, client_round
from .config import Plan
from .costs import Costs
from .executors.work import ClientRequest
from .faults import TimeModel
from .forms import check_state
from .joining import Joining
from .metrics import Metrics
from .participants import usual_cohort
from .private_states import MemoryStates
from .scoring import Scoring
from .writing import Writing


def first_states(method: Method, task: Task, federation: Federation) -> Callable[[int], Params]:
    """The private states of clients before their first training, by number."""

    def initial(client: int) -> Params:
        key = random.key(federation.seed, "client", client)
        state = method.init_client(task, client, key)
        check_state(method, "init_client", state)
        return aligned(state)

    return initial


def memory_states(method: Method, task: Task, federation: Federation) -> MemoryStates:
    """The private states of a federation's clients, in memory, before the first round."""
    return MemoryStates(first_states(method, task, federation))


def first_server(method: Method, task: Task, federation: Federation) -> Server:
    """The server's state before the first round."""
    key = random.key(federation.seed, "server")
    server = method.init_server(task, federation.num_clients, key)
    check_state(method, "init_server", server)
    return aligned(server)


def cohort_of(federation: Federation, number: int, clients: tuple[int, ...]) -> Cohort:
    """These clients as the cohort of round ``number``."""
    sizes = [federation.num_examples(client) for client in clients]
    key = random.key(federation.seed, number, "aggregate")
    num_examples = torch.tensor(sizes, dtype=torch.float64)
    return Cohort(clients, num_examples, number, key, federation.num_clients)


def upload_chain(
    method: Method,
    task: Task,
    federation: Federation,
    plan: Plan,
    recent_norms: Sequence[Mapping[int, float]] = (),
    masking: Clients | None = None,
    clip: float | None = None,
) -> Chain:
    """What uploads pass through, from the training to the wire; ``recent_norms``, ``masking`` and
    ``clip`` as in `rounds`."""
    cohort, attack, robust = plan.cohort, plan.attack, method.robust
    private = _private(method, federation, plan, clip)
    above = cohort.above_norm
    if private is not None or plan.secure_aggregation.is_active:
        above = "keep"
    bound = cohort.max_norm, cohort.norm_factor, cohort.norm_quantile
    masks = _secure(method, task, federation, plan, masking, from_update=private is not None)
    links: list[Link | None] = [
        RobustRule(robust, method.name) if robust.is_active else None,
        NormBound(above, *bound, recent_norms) if above != "keep" else None,
        private,
        Attack(attack, plan.attackers(federation)) if attack.on_uploads else None,
        Staleness() if cohort.buffer is not None else None,
        Packing(partial(method.pack, task), partial(method.unpack, task)) if not masks else None,
        masks,
    ]
    active = tuple(link for link in links if link is not None)
    known = federation.server_seed, task.buffers, partial(method.unchanged, task)
    beside, products = method.beside_update, method.products(task)
    return Chain(active, UploadContext(*known, beside=beside, products=products))


def _secure(
    method: Method,
    task: Task,
    federation: Federation,
    plan: Plan,
    masking: Clients | None,
    *,
    from_update: bool,
) -> Link | None:
    """The link that masks uploads, if the plan has it; of methods that average, and pack nothing.
    Raises InputError where its package is missing."""
    if not plan.secure_aggregation.is_active or method.trains_alone:
        return None
    try:
        from ..uploads.secure.link import Secure
        from ..uploads.secure.simulation import Simulation
    except ModuleNotFoundError:
        raise InputError(
            "[secure_aggregation] needs cryptography: pip install 'fedtailor[privacy]'"
        ) from None
    config, own_weight = plan.secure_aggregation, None
    if method.weighs_by_mean:
        own_weight = partial(method.own_weight, task)
    weigh = weighing(method, federation, plan)
    clients = masking or Simulation(weigh, own_weight)
    account = plan.account(federation) if plan.privacy.by_clients else None
    noise = account.noise * plan.privacy.bound if account else 0.0
    return Secure(config, clients, weigh, from_update, own_weight, noise, method.name)


def weighing(method: Method, federation: Federation, plan: Plan) -> Weighing:
    """How clients weigh themselves whose updates are masked: by `Method.client_weights` of their
    own number of examples and of as many other clients as there are, all with the same number."""

    def weight(own: int, total: int, count: int) -> float:
        each = (total - own) / (count - 1)
        sizes = torch.tensor([own, *[each] * (count - 1)], dtype=torch.float64)
        key = random.key(federation.seed, "aggregate")
        cohort = Cohort(tuple(range(count)), sizes, 1, key, federation.num_clients)
        return float(checked_weights(method, cohort.with_max_share(plan.max_share))[0])

    alike = plan.privacy.of_clients  # so all count as one: a total of examples would have no noise
    return Weighing(federation.num_examples if not alike else lambda client: 1, weight)


def _private(
    method: Method, federation: Federation, plan: Plan, clip_now: float | None
) -> Private | None:
    """The link that clips and adds noise, if the plan has it."""
    account, clip = plan.account(federation), plan.privacy.bound
    if not isinstance(account, Account) or method.trains_alone:
        return None
    quantile, secure, size = plan.privacy.clip_quantile, plan.secure_aggregation, account.cohort
    if quantile is None:
        return Private(clip, 0.0 if plan.privacy.by_clients else account.noise, size, method.name)
    start = clip if clip_now is None else clip_now
    private = Private(start, account.update_noise, size, method.name, quantile)
    most = secure.range if secure.is_active else private.most
    return replace(private, count_noise=account.count_noise, most=most)


def _step_noise(method: Method, federation: Federation, plan: Plan) -> StepNoise | None:
    """The noise in clients' steps, if the plan has it."""
    account, clip = plan.account(federation), plan.privacy.bound
    if not isinstance(account, RecordAccount) or method.trains_alone:
        return None
    uses = method.steps_on_batch(plan.local.passes)
    std = account.noise * clip * math.sqrt(uses)
    return StepNoise(clip, std, uses, (federation.server_seed, "privacy", method.name))


def time_model(method: Method, task: Task, federation: Federation, plan: Plan) -> TimeModel | None:
    """How long clients need, measured on the `first_steps`; None if time is not simulated."""
    faults = plan.faults
    if not faults.machines:
        return None
    costs = first_costs(method, task, federation, plan)
    assert costs.flops is not None
    kinds = faults.kinds(federation.seed, federation.num_clients)
    down, up = sum(costs.down.values()), sum(costs.up.values())
    return TimeModel(faults.machines, kinds, costs.flops, down, up)


def first_steps(
    method: Method, task: Task, federation: Federation, plan: Plan, limit: int = 1
) -> tuple[Works, Server, ClientRequest]:
    """At most ``limit`` batches of an epoch in round 1, of the client with the median number of
    examples: the works, the server's state, and the request to the client."""
    cohort = sorted(usual_cohort(method, federation, plan), key=federation.num_examples)
    client = cohort[len(cohort) // 2]
    size = plan.local.batch_size
    steps = min(limit, max(1, federation.num_steps(client, LocalConfig(size))))
    # so few steps spend otherwise than the run does
    plan = replace(plan, local=LocalConfig(size, steps=steps), privacy=plan.privacy.endless)
    private = first_states(method, task, federation)(client)
    scale = plan.schedule.factor(1, plan.rounds)
    request = ClientRequest(client, 1, private, "train", 1, scale, steps)
    server = to_device(first_server(method, task, federation), task.device)
    return client_works(method, task, federation, plan), server, request


def first_costs(method: Method, task: Task, federation: Federation, plan: Plan) -> Costs:
    """The costs of a client, the floating-point operations of a step included: their mean over at
    most four `first_steps`. What is computed once for each example is not counted."""
    federation = as_trained(method, task, federation, plan)
    works, server, request = first_steps(method, task, federation, plan, limit=4)
    inputs = works.train.prepare(server, request)
    updates: list[ClientUpdate] = []
    flops = count_flops(lambda: updates.append(works.train.complete(request, inputs)))
    return replace(updates[0].costs, flops=round(flops / request.size))


def blank_upload(
    method: Method, task: Task, federation: Federation, chain: Chain
) -> tuple[Params, Params]:
    """An upload of a client that trains on blank examples, which needs no client's data: as the
    server gets it, and as it travels."""
    device, key = task.device, random.key(federation.seed, "form")
    server = to_device(first_server(method, task, federation), device)
    received = to_device(method.send(task, server, 0), device)
    private = to_device(method.init_client(task, 0, key), device)
    public = public_batch(federation, task) if method.needs_public else None
    # of no round, so that what a method does in a certain one alone is left out
    context = ClientContext(key.to(device), 1.0, 0, public)
    steps = [to_device(blank_batch(federation.dataset), device)]
    upload, _, _ = client_round(method, task, received, private, steps, context)
    at = chain.at(received, 0, [0])
    packed = chain.send(upload, at)
    return chain.receive(packed, at), packed


def blank_batch(dataset: Dataset) -> Batch:
    """Two blank examples of the data set's form, which need none of its own."""
    count = dataset.objective.sequences
    sizes = Ragged(np.full(2 * count, 4 // count), np.array([0, count, 2 * count]))
    inputs: Tokens | Images = Tokens(
        np.zeros(8, np.int64), np.array([0, 4, 8]), sizes=None if count == 1 else sizes
    )
    if dataset.picture is not None:
        inputs = Images(np.zeros((2, *dataset.picture), np.uint8))
    labels = dataset.objective.blank_targets(2, 4, dataset.num_classes)
    return Dataset(inputs, 2, dataset.task, "blank", labels).batch(np.arange(2))


class Works(NamedTuple):
    """What an executor is asked to do; `_asdict` has it by name."""

    train: Training
    evaluate: ClientEvaluation
    join: Joining
    score: Scoring
    write: Writing


def client_works(
    method: Method,
    task: Task,
    federation: Federation,
    plan: Plan,
    metrics: Mapping[str, MetricFunction] | None = None,
) -> Works:
    """What an executor is asked to do; ``metrics`` as in `rounds`."""
    wanted = Metrics(plan.evaluate, metrics or {})
    public = public_batch(federation, task) if method.needs_public else None
    context, trigger = (method, task, federation), None
    if plan.attack.kind == "backdoor":
        trigger = Trigger.of(federation.dataset.inputs.values, plan.attack.target)
    attack = plan.attack, plan.attackers(federation), trigger
    chain = upload_chain(method, task, federation, plan)
    noise = _step_noise(method, federation, plan)
    train = Training(*context, plan.local, public, chain, noise, *attack)
    batch_size = plan.evaluate.batch_size
    scoring = Scoring(*context, wanted, trigger)
    writing = Writing(*context, plan, wanted)
    evaluate = ClientEvaluation(*context, plan.local, public, batch_size, scoring, writing)
    alone = replace(chain, links=())  # who joins sends nothing
    joining = Joining(replace(train, attackers=frozenset(), noise=None, chain=alone), evaluate)
    return Works(train, evaluate, joining, scoring, writing)


def public_batch(federation: Federation, task: Task) -> Batch:
    """The examples that everybody has."""
    assert federation.public is not None
    rows = np.arange(federation.public.num_train)
    return to_device(federation.public.batch(rows), task.device)


def with_least_batch(
    method: Method, task: Task, federation: Federation, batch_size: int
) -> Federation:
    """``federation`` without batches that are too small for the method or the model. Raises
    InputError where there are no others."""
    inputs, least = federation.dataset.inputs, method.min_batch_size
    if federation.remote and isinstance(inputs, Images):
        inputs = Images(np.zeros((1, *inputs.values.shape[1:]), np.uint8))
    if len(inputs):
        one = to_device(inputs.batch(np.arange(1)), task.device)
        least = max(least, task.least_examples(one))
    if least == 1:
        return federation
    why = f"{method.name} with this model can't train on one example (batch normalisation)"
    if batch_size < least:
        raise InputError(f"local.batch_size = {batch_size}: {why}; allowed: {least} or more")
    sizes = federation.partition.train.sizes()
    if sizes.max() < least:
        raise InputError(
            f"{why}, and no client has more; give clients more rows, or set model.batch_norm = "
            "'frozen'"
        )
    return replace(federation, least_batch=least)


def as_trained(method: Method, task: Task, federation: Federation, plan: Plan) -> Federation:
    """``federation`` without batches that are too small, and with what the method works out once an
    example, if it fits into memory. Raises InputError where all batches are too small."""
    federation = with_least_batch(method, task, federation, plan.local.batch_size)
    engine = plan.engine
    if engine.cache_mb == 0 or federation.remote:
        return federation

    def compute(batch: Batch) -> Params:
        batch = to_device(batch, task.device)
        ids = batch.get("input_ids")
        is_one = ids is None or ids.dim() < 3  # sequence an example
        return {**(method.precompute(task, batch) if is_one else {}), **task.reference(batch)}

    first = int(federation.partition.train.sizes().argmax())  # client 0's may be elsewhere
    if not compute(federation.dataset.batch(federation.partition.train[first][:1])):
        return federation
    cache = ExampleCache(compute, federation.dataset, federation.partition.rows)
    if not cache.fits(engine.cache_mb):
        return federation
    cache.go_on_from(federation.last_results)
    return replace(federation, example_cache=cache)
