"""The checks, one function each, on ragged clients and with no list of exceptions.

Each raises CheckFailedError with a message that says what is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial

import torch

from .. import random
from ..data.config import LocalConfig
from ..data.federation import pad_and_stack
from ..engine.client import client_round
from ..engine.config import EngineConfig, EvaluateConfig, Plan
from ..engine.costs import wire_bytes
from ..engine.executors.captured import Arguments, Recording, with_tensors
from ..engine.prepare import memory_states
from ..engine.rounds import rounds
from ..errors import InputError
from ..method import Cohort, checked_weights
from ..optim import ClientContext
from ..params import Params, count, decode, encode, row, scale, stack
from ..stacked import weighted_sum
from ..task.checkpointing import block_paths
from ..task.task import Task
from . import tape
from .case import Case, ClientRound, require, require_close


def runs(case: Case) -> None:
    """A run of a few rounds ends with finite numbers."""
    losses = case.whole.last.losses
    require(all(map(math.isfinite, losses)), f"the last round's losses are {list(losses)}")


def sequential_equals_vectorised(case: Case, error: float = 2e-5) -> None:
    """Clients that run together under ``torch.func.vmap`` get the numbers that each gets alone, but
    for an ``error`` of rounding."""
    one, task, federation = case.whole, case.task(), case.subject.federation
    states = memory_states(case.method, task, federation)
    # of 4 clients: a chunk of one, too
    plan = replace(case.subject.plan, engine=EngineConfig("vectorised", clients_per_step=3))
    *_, last = rounds(case.method, task, federation, plan, store=states)
    what = "with the executors sequential and vectorised"
    require_close(one.last.server, last.server, error, f"the server's state {what}")
    for client in range(federation.num_clients):
        require_close(
            one.states.read(client), states.read(client), error, f"client {client}'s state {what}"
        )
    _require_near(one.last.losses, last.losses, 1e-5, f"the training losses {what}")
    for a, b in zip(one.last.evaluations, last.evaluations, strict=True):
        _require_near(a.loss, b.loss, 1e-4, f"the losses of the {a.model} models {what}")


def padding_is_invisible(case: Case) -> None:
    """Examples and batches of weight 0, which fill up smaller clients, change nothing."""
    method, task, federation = case.method, case.task(), case.subject.federation
    server = method.init_server(task, federation.num_clients, random.key(0))
    received, private = method.send(task, server, 4), method.init_client(task, 4, random.key(4))
    batches = case.batches(4)
    padded = [row(batch, 0) for batch in pad_and_stack([batches, case.batches(2)])]
    context = case.context(1)
    plain = client_round(method, task, received, private, batches, context)
    other = client_round(method, task, received, private, padded, context)
    what = "with padding, which has batch['weight'] = 0,"
    require_close(plain[0], other[0], 2e-5, f"{what} the upload")
    require_close(plain[1], other[1], 2e-5, f"{what} what the client keeps")
    require_close({"loss": plain[2]}, {"loss": other[2]}, 2e-5, f"{what} the loss")


def parts_of_batches_add_up(case: Case) -> None:
    """Batches that are computed in parts of a few examples, with ``context.micro_batch``, give what
    they give whole; where they do not, ``takes_parts`` is False."""
    method, task, client = case.method, case.task(), case.first_round(4)
    if not method.takes_parts or task.mixes_examples:
        return
    private = method.init_client(task, 4, random.key(4))
    padded = [row(batch, 0) for batch in pad_and_stack([case.batches(4), case.batches(2)])]
    whole, parts = (
        client_round(method, task, client.received, private, padded, context)
        for context in (case.context(4), case.context(4)._replace(micro_batch=3))
    )
    what = "with batches in parts (takes_parts = False refuses them),"
    require_close(whole[0], parts[0], 2e-5, f"{what} the upload")
    require_close(whole[1], parts[1], 2e-5, f"{what} what the client keeps")
    require_close({"loss": whole[2]}, {"loss": parts[2]}, 2e-5, f"{what} the loss")


def checkpointing_changes_nothing(case: Case) -> None:
    """With ``engine.checkpointing`` a round gives the same as without; where it does not,
    ``takes_checkpointing`` is False."""
    method, one = case.method, case.first_round(0)
    backbone = case.subject.backbone
    if not method.takes_checkpointing or not block_paths(backbone):
        return
    task = Task(backbone, method.adapt, checkpointing=True)
    private = method.init_client(task, 0, random.key(0))
    upload, kept, _ = client_round(
        method, task, one.received, private, case.batches(0), case.context(0)
    )
    what = "with checkpointing (takes_checkpointing = False refuses it),"
    require_close(one.upload, upload, 2e-5, f"{what} the upload")
    require_close(one.private, kept, 2e-5, f"{what} what the client keeps")


def a_recording_gives_the_same(case: Case) -> None:
    """What a GPU records of one client's training gives another client's numbers, too, at another
    learning rate; where it can't be recorded, ``recordable`` is False."""
    method, task = case.method, case.task()
    if not method.recordable:
        return
    padded = pad_and_stack([case.batches(client)[:1] for client in (0, 4)], most_tokens=0)

    def arguments(at: int, client: int) -> Arguments:
        private = method.init_client(task, client, random.key(client))
        told = case.context(client)._replace(round=3, lr_scale=0.5 / (at + 1), lr_slope=0.1 - at)
        received = scale(case.first_round(0).received, 1 + at)
        return received, private, [row(batch, at) for batch in padded], told

    train = partial(client_round, method, task)
    train(*arguments(0, 0))  # what is made once, is made now
    try:
        recording = Recording(tape.capture, train, with_tensors(arguments(0, 0)))
    except RuntimeError as error:
        require(False, f"a GPU can't record its training: {error}; set recordable = False")
    found, expected = recording.play(with_tensors(arguments(1, 4))), train(*arguments(1, 4))
    what = "as a GPU would record it (recordable = False refuses that),"
    require_close(found[0], expected[0], 0.0, f"{what} the upload")
    require_close(found[1], expected[1], 0.0, f"{what} what the client keeps")
    require_close({"loss": found[2]}, {"loss": expected[2]}, 0.0, f"{what} the loss")


def nothing_private_is_sent(case: Case) -> None:
    """No private tensor stands in what a client sends or receives, neither by name nor by value."""
    method, task, one = case.method, case.task(), case.first_round(0)
    upload, private, _ = client_round(
        method, task, one.received, one.private, case.batches(0), case.context(1)
    )
    for each in (one, ClientRound(one.received, upload, private)):
        sent = encode(method.pack(task, each.upload))
        for state, what in ((decode(sent), "sends"), (each.received, "receives")):
            names = [name for name in state if method.is_private(task, name)]
            require(not names, f"a client {what} {', '.join(names)}, which is_private")
        public = [name for name in each.private if not method.is_private(task, name)]
        require(not public, f"a client keeps {', '.join(public)}, which is not is_private")
        _require_secret(sent, each.private, "an upload")


def packed_uploads_arrive_whole(case: Case) -> None:
    """``unpack`` undoes ``pack``, and gives all clients' uploads one shape."""
    method, task = case.method, case.task()
    shapes = set()
    for client in (0, 1, 2):
        upload = case.first_round(client).upload
        arrived = method.unpack(task, decode(encode(method.pack(task, upload))))
        require_close(arrived, upload, 0.0, "after pack and unpack, an upload")
        shapes.add(tuple((name, value.shape) for name, value in sorted(arrived.items())))
    require(len(shapes) == 1, f"uploads of clients differ in names or shapes: {shapes}")


def honest_uploads_are_accepted(case: Case) -> None:
    """``check_upload`` accepts what clients send, in the first round and after the last one."""
    method, task = case.method, case.task()
    for client in (0, 1, 2):
        one = case.first_round(client)
        _require_accepted(case, task, client, one.received, one.upload)
    received = method.send(task, case.whole.last.server, 0)
    context, private = case.context(2), case.whole.states.read(0)
    upload, _, _ = client_round(method, task, received, private, case.batches(0), context)
    _require_accepted(case, task, 0, received, upload)


def what_is_sent_keeps_its_form(case: Case) -> None:
    """In the last round clients receive tensors of the same names, types and shapes as in the
    first, up to ``changing_sizes``."""
    method, task, clients = case.method, case.task(), case.subject.federation.num_clients
    first, last = method.init_server(task, clients, random.key(0)), case.whole.last.server
    for client in range(clients):
        before, after = (method.send(task, server, client) for server in (first, last))
        other = before.keys() ^ after.keys()
        require(not other, f"a client receives {', '.join(sorted(other))} in some rounds alone")
        for name, old in before.items():
            shapes = [(value.dtype, list(value.shape)) for value in (old, after[name])]
            if not any(fnmatchcase(name, pattern) for pattern in method.changing_sizes):
                require(
                    shapes[0] == shapes[1],
                    f"{name}, which a client receives, is {shapes[0]} and {shapes[1]} in later "
                    "rounds; name it in changing_sizes",
                )


def the_weights_have_the_sum_one(case: Case) -> None:
    """`client_weights` have the sum 1, also where some clients don't take part in a round."""
    clients = case.subject.federation.num_clients
    for members in {(0, 1), tuple(range(clients))}:
        sizes = torch.tensor([5.0, 20.0, 10.0])[torch.arange(len(members)) % 3].double()
        checked_weights(case.method, Cohort(members, sizes, 1, random.key(0), clients))


def the_mean_is_enough(case: Case) -> None:
    """A method that says ``needs_only_mean`` aggregates the mean to what it makes of all."""
    method, task = case.method, case.task()
    if not method.needs_only_mean:
        return
    clients = case.subject.federation.num_clients
    server = method.init_server(task, clients, random.key(0))
    one = case.first_round(0).upload
    uploads = stack([one, scale(one, 0.5), scale(one, 3.0)])
    sizes = torch.tensor([5.0, 20.0, 10.0]).double()
    cohort = Cohort((0, 1, 2), sizes, 1, random.key(0), clients)
    each = method.aggregate(task, server, uploads, cohort)
    mean = weighted_sum(uploads, method.client_weights(cohort))
    row_of_mean = {name: value[None] for name, value in mean.items()}
    pooled = method.aggregate(task, server, row_of_mean, cohort.pooled())
    require_close(
        pooled, each, 1e-6, "needs_only_mean, but of the uploads' mean aggregate makes another "
        "state than of all uploads"
    )  # fmt: skip


def the_server_holds_nothing_private(case: Case) -> None:
    """No private tensor reaches the server's state."""
    last, states, task = case.whole.last, case.whole.states, case.task()
    names = [name for name in last.server if case.method.is_private(task, name)]
    require(not names, f"the server's state has {', '.join(names)}, which is_private")
    for client in last.cohort.clients:
        _require_secret(encode(last.server), states.read(client), "the server's state")


def resumes_exactly(case: Case) -> None:
    """A run that is stopped after each round ends with the same bytes, and so does any run with the
    same seed."""
    path = case.folder / "resumed"
    for until in (*range(1, case.subject.plan.rounds), None):
        case.run(path, until)
    undisturbed, resumed = (
        {p.name: p.read_bytes() for p in folder.iterdir()} for folder in (case.whole.path, path)
    )
    require(undisturbed.keys() == resumed.keys(), "a resumed run has other files")
    for file in sorted(undisturbed.keys() - {"timings.jsonl", "commit.json"}):
        require(
            undisturbed[file] == resumed[file],
            f"a second run with the same seed, resumed after each round, has another {file}; take "
            "all random numbers from keys, and keep all states in tensors",
        )


def another_seed_gives_other_numbers(case: Case) -> None:
    """The seed decides."""
    first, federation = case.whole.first, replace(case.subject.federation, seed=1)
    other = next(rounds(case.method, case.task(), federation, case.subject.plan))
    losses = [dict(zip(r.cohort.clients, r.losses, strict=True)) for r in (first, other)]
    both = losses[0].keys() & losses[1].keys()
    require(
        any(losses[0][client] != losses[1][client] for client in both),
        "with another seed all clients have the same losses",
    )


def training_lowers_the_loss(case: Case) -> None:
    """The training loss falls on clients that are easy to learn from."""
    subject = case.subject
    plan = Plan(
        rounds=8,
        local=LocalConfig(batch_size=16, epochs=4),
        engine=EngineConfig("vectorised"),
        evaluate=EvaluateConfig(every=8, clients=1),
    )
    task = Task(subject.easy_backbone, case.method.adapt)
    done = rounds(case.method, task, subject.easy_federation, plan)
    losses = [sum(each.losses) / len(each.losses) for each in done]
    require(
        max(losses[-2:]) < subject.falls_to * losses[0],
        f"over 8 rounds the training loss goes from {losses[0]:.4f} to {losses[-1]:.4f}; it must "
        f"fall below {subject.falls_to} of the first (is the default learning rate right?)",
    )


def clients_are_evaluated_on_their_own_examples(case: Case) -> None:
    """Every client's results are those of its own state on its own examples."""
    last, states, federation = case.whole.last, case.whole.states, case.subject.federation
    found = {(e.model, e.split): e for e in last.evaluations}
    personal = found["personal", "test"]
    clients = tuple(range(federation.num_clients))
    require(personal.clients == clients, f"evaluated are the clients {personal.clients}")
    require(all(n > 0 for n in personal.num_examples), "a client has no test examples")
    rates = [rate for rate in personal.accuracy if rate is not None]
    require(all(0 <= rate <= 1 for rate in rates), f"accuracies are {rates}")
    require(("personal", "validation") in found, "there are no validation results")
    method, task = case.method, case.task()
    if method.finetune_passes == 0:  # the state is at hand: work the result out again
        state = {**method.send(task, last.server, 2), **states.read(2)}
        batch = federation.dataset.batch(federation.rows(2, "test"))
        scores = task.score(method.predict(task, state, batch), batch)
        loss, hits = scores.mean().item(), (scores.correct.sum() / scores.count.sum()).item()
        _require_near(personal.loss[2:3], [loss], 1e-4, "client 2's loss, worked out again")
        rate = hits if federation.dataset.objective.has_hits else None
        _require_near(personal.accuracy[2:3], [rate], 1e-6, "client 2's accuracy, worked out again")


def costs_count_what_is_exchanged(case: Case) -> None:
    """The costs are all bytes that are sent down, and what the client with the least to do, the
    first one to train, receives, sends and keeps."""
    first, federation, method, task = (
        case.whole.first, case.subject.federation, case.method, case.task()
    )  # fmt: skip
    server = method.init_server(task, federation.num_clients, random.key(0, "server"))
    received = {client: method.send(task, server, client) for client in first.cohort.clients}
    down = sum(len(encode(state)) for state in received.values() if state)
    require(first.bytes_down == down, f"bytes_down is {first.bytes_down}, sent are {down}")
    _, client = min(zip(first.steps, first.cohort.clients, strict=True), key=lambda pair: pair[0])
    private = method.init_client(task, client, random.key(0, "client", client))
    context = ClientContext(random.key(0, 1, client, "train"), public=case.public)
    upload, private, _ = client_round(
        method, task, received[client], private, case.batches(client), context
    )
    packed, costs = method.pack(task, upload), first.costs
    assert costs is not None
    for name, counted, exchanged in (
        ("down", costs.down, wire_bytes(received[client])),
        ("up", costs.up, wire_bytes(packed)),
        ("communicated", costs.communicated, count(packed)),
        ("private", costs.private, count(private)),
        ("trained", costs.trained, method.num_trained(task)),
    ):
        require(counted == exchanged, f"costs.{name} is {counted}, but it is {exchanged}")


CHECKS: tuple[Callable[[Case], None], ...] = (
    runs,
    sequential_equals_vectorised,
    padding_is_invisible,
    parts_of_batches_add_up,
    checkpointing_changes_nothing,
    a_recording_gives_the_same,
    nothing_private_is_sent,
    packed_uploads_arrive_whole,
    honest_uploads_are_accepted,
    what_is_sent_keeps_its_form,
    the_weights_have_the_sum_one,
    the_mean_is_enough,
    the_server_holds_nothing_private,
    resumes_exactly,
    another_seed_gives_other_numbers,
    training_lowers_the_loss,
    clients_are_evaluated_on_their_own_examples,
    costs_count_what_is_exchanged,
)


def _require_accepted(
    case: Case, task: Task, client: int, received: Params, upload: Params
) -> None:
    arrived = case.method.unpack(task, decode(encode(case.method.pack(task, upload))))
    try:
        case.method.check_upload(task, client, received, arrived, len(case.batches(client)), 1.0)
    except InputError as error:
        require(False, f"check_upload refuses an honest upload of client {client}: {error}")


def _require_near(
    a: Sequence[float | None], b: Sequence[float | None], tolerance: float, what: str
) -> None:
    one, other = (
        torch.tensor([math.nan if x is None else x for x in values], dtype=torch.float64)
        for values in (a, b)
    )
    require_close({"values": one}, {"values": other}, tolerance, what)


def _require_secret(data: bytes, private: Params, what: str) -> None:
    """Raise CheckFailedError if encoded tensors hold a private one, by name or by value (4 or more,
    not all equal: nobody's secret are the zeros that a tensor starts with)."""
    for name, value in private.items():
        require(name.encode() not in data, f"{what} has a tensor called {name}, which is private")
        if value.numel() >= 4 and bool((value != value.flatten()[0]).any()):
            inside = value.contiguous().numpy().tobytes() in data
            require(not inside, f"{what} has the values of {name}, which is private")
