"""The border: here what a node sends becomes values that the server relies on, or a `WireError`.

Everything is checked against what the server knows by itself: the experiment, the request, the
form of the method's uploads, and the examples that clients had when they were counted.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
from flwr.app import RecordDict

from ..data.federation import Federation
from ..data.names import check_names
from ..engine.client import ClientEvaluationResult
from ..engine.executors.work import ClientRequest, Refusal
from ..engine.metrics import LARGEST, Metrics, MetricValues
from ..engine.scoring import SPLITS
from ..errors import InputError, brief
from ..method import Method
from ..objectives import OBJECTIVES
from ..params import Params, not_finite, pick, to_device
from ..runs.experiment import Experiment
from ..task.batch_norm import check_variances
from ..task.task import Task
from ..uploads.chain import Chain
from .codec import FAULTS, Limits, WireError, named_payload, unpack, words
from .messages import ClientReply, NodeInfo, RoundReply, RoundRequest
from .schema import UploadSchema, check_form, form_of

MOST_EXAMPLES = 10**9  # of a client; sums over all clients stay far below 2^63
MOST_CLASSES = 10**5
_MOST_TOKENS = 1 << 20  # of an example
_MOST_PIXELS = 1 << 26  # values of a picture
_INFO = 1 << 20  # characters in which a node describes its data ...
_A_CLIENT = 1 << 10  # ... and of a client with one seed, its counts by class among them
_REPLY = 1 << 16  # characters of a client's reply, without its confusion matrices
# of a client, with the payload; or why there is no result, in words fit for a log
Answer = tuple[ClientReply, Params] | Refusal


def read_info(content: RecordDict | str, experiment: Experiment) -> NodeInfo:
    """What a node says of itself, as far as it can be judged without the others."""
    if isinstance(content, str):
        raise WireError(content)
    seeds, total, data = experiment.seeds, experiment.split.clients, experiment.data
    limits = Limits(_INFO + _A_CLIENT * (total or 1 << 12) * len(seeds))
    info, _ = unpack(content, NodeInfo, limits)
    _check_clients(info, total)
    if data.task not in (None, info.task):
        raise WireError(f"its task is {info.task}, the experiment's is {data.task}")
    if len(info.classes) > MOST_CLASSES:
        raise WireError(f"it has {len(info.classes)} classes; at most {MOST_CLASSES} are read")
    check_names("class", info.classes)
    if info.task not in OBJECTIVES:
        raise WireError(f"its task is {brief(info.task)}; allowed: {', '.join(OBJECTIVES)}")
    if OBJECTIVES[info.task].names_classes and not info.classes:
        raise WireError(f"its task is {info.task}, and it has no classes")
    if data.classes and info.classes != data.classes:
        raise WireError(f"its classes are {info.classes}; the experiment's are {data.classes}")
    is_scaled = bool(OBJECTIVES[info.task].settings) and len(info.scale) in (2, 3)
    if info.scale and not (is_scaled and all(map(math.isfinite, info.scale))):
        raise WireError(f"its scale is {info.scale}; must be two or three numbers")
    picture = info.picture
    if picture is not None and (
        len(picture) != 3 or min(picture) < 1 or math.prod(picture) > _MOST_PIXELS
    ):
        raise WireError(f"its picture is {picture}; must be channels, height and width")
    _check_sizes(info, seeds)
    return replace(
        info,
        data=words(info.data),
        sizes=tuple(replace(sizes, partition=words(sizes.partition)) for sizes in info.sizes),
    )


def _check_clients(info: NodeInfo, total: int | None) -> None:
    served = info.clients + info.new_clients
    if served != tuple(sorted(set(served))) or (info.clients and info.new_clients):
        raise WireError("its clients must be in ascending order, each once")
    if total is not None and info.clients and info.num_clients != total:
        raise WireError(f"its num_clients is {info.num_clients}; split.clients is {total}")
    if not 0 < info.num_clients <= MOST_EXAMPLES:
        raise WireError(f"its num_clients is {info.num_clients}; allowed: 1 to {MOST_EXAMPLES}")
    for client in info.clients:
        if not 0 <= client < info.num_clients:
            raise WireError(
                f"it serves client {client}; with {info.num_clients} clients, numbers are 0 to "
                f"{info.num_clients - 1}"
            )


def _check_sizes(info: NodeInfo, seeds: Sequence[int]) -> None:
    told = [sizes.seed for sizes in info.sizes]
    if sorted(told) != sorted(seeds):
        raise WireError(f"its sizes are of seeds {told}, not of {list(seeds)}")
    for sizes in info.sizes:
        counts = sizes.train, sizes.validation, sizes.test
        if {len(count) for count in counts} != {len(info.clients)}:
            raise WireError(f"its sizes for seed {sizes.seed} don't fit its clients")
        for client, train, *others in zip(info.clients, *counts, strict=True):
            if not 0 < train <= MOST_EXAMPLES or not all(0 <= n <= MOST_EXAMPLES for n in others):
                raise WireError(
                    f"client {client} has {train} training examples, and {others} others; allowed: "
                    f"1 to {MOST_EXAMPLES}, and 0 to {MOST_EXAMPLES}"
                )
        totals = [sum(parts) for parts in zip(*counts, strict=True)]
        if sizes.labels and not _count_all(sizes.labels, totals, len(info.classes)):
            raise WireError(f"its labels for seed {sizes.seed} don't fit its sizes")


def _count_all(labels: Sequence[Sequence[int]], totals: Sequence[int], num_classes: int) -> bool:
    """Whether each client's labels are counts by class that add up to its examples."""
    return len(labels) == len(totals) and all(
        len(row) == num_classes and min(row, default=0) >= 0 and sum(row) == total
        for row, total in zip(labels, totals, strict=True)
    )


def reply_limits(
    message: RoundRequest, clients: int, schema: UploadSchema, num_classes: int
) -> Limits:
    """What a node's answer to a request to so many ``clients`` may have."""
    names = 4 * len(schema.packed) + 2 * sum(map(len, schema.packed))
    text = _REPLY + clients * (_REPLY + names + 64 * num_classes**2)
    uploads = clients if message.kind in ("train", "reweigh") else 0
    if message.masking is not None:  # at most a share for each client
        text += clients * 256 * len(message.masking.clients)
    return Limits(text, uploads, uploads * schema.bytes)


def read_answers(
    node: int,
    content: RecordDict | str,
    message: RoundRequest,
    clients: Collection[int],
    limits: Limits,
) -> dict[int, Answer]:
    """What a node answers to ``message`` of each of its ``clients``."""
    try:
        answers = _read_reply(content, message, clients, limits)
    except WireError as error:
        return dict.fromkeys(clients, Refusal(str(error)))
    silence = Refusal(f"node {node} says nothing of it")
    return {client: answers.get(client, silence) for client in clients}


def _read_reply(
    content: RecordDict | str, message: RoundRequest, clients: Collection[int], limits: Limits
) -> dict[int, Answer]:
    """Raises WireError where there is no answer, it can't be read, or it answers something else."""
    if isinstance(content, str):
        raise WireError(content)
    answer, payloads = unpack(content, RoundReply, limits)
    if (answer.run, answer.round, answer.kind) != (message.run, message.round, message.kind):
        raise WireError(
            f"a report on {answer.kind}, round {answer.round}, instead of {message.kind}, round "
            f"{message.round}"
        )
    if len(answer.results) > len(clients):
        raise WireError(f"{len(answer.results)} results for {len(clients)} clients")
    answers: dict[int, Answer] = {}
    for reply in answer.results:
        if reply.client not in clients or reply.client in answers:
            raise WireError(f"client {reply.client} was not asked for, or is reported on twice")
        answers[reply.client] = _answer(reply, payloads)
    return answers


def _answer(reply: ClientReply, payloads: Sequence[Params]) -> Answer:
    if reply.error is not None:
        return Refusal(words(reply.error or "an error"), reply.diverged)
    if reply.payload is None:
        return reply, {}
    return reply, named_payload(payloads, reply.payload, "reply")


def accept_upload(
    method: Method,
    task: Task,
    chain: Chain,
    schema: UploadSchema,
    received: Params,
    request: ClientRequest,
    reply: ClientReply,
    packed: Params,
) -> Params:
    """A client's upload, as the ``chain`` receives it; the client has trained from what it
    ``received``, as the ``request`` asked it to. Raises WireError where it can't be aggregated: not
    finite, not of this ``schema``, or with values that no client sends."""
    if reply.loss is None or not 0 <= reply.loss <= LARGEST:
        raise WireError(f"its loss is {reply.loss}; allowed: a finite number, 0 or more")
    schema.check_packed(packed)
    at = chain.at(received, request.round, [request.client])
    try:
        upload = chain.receive(to_device(packed, task.device), at)
        same = chain.hidden or form_of(chain.send(upload, at)) == form_of(packed)
    except FAULTS as error:
        raise WireError(f"its upload can't be unpacked: {error}") from None
    check_form("its upload", upload, schema.form)
    if not same:
        raise WireError("its upload is not packed as the method packs it")
    if chain.hidden:  # nothing else is known of it
        return upload
    if (name := not_finite(upload)) is not None:
        raise WireError(f"{name} holds values that are not finite")
    try:
        check_variances(
            pick(upload, upload.keys() & received.keys()), received if method.sends_updates else {}
        )
        method.check_upload(task, request.client, received, upload, request.size, request.lr_scale)
    except InputError as error:
        raise WireError(str(error)) from None
    return upload


def evaluation_of(
    reply: ClientReply, metrics: Metrics, federation: Federation
) -> ClientEvaluationResult:
    """A client's results. Raises WireError where they can't be: a number that is not finite or
    negative, more hits than predictions, predictions of other examples than the client's, other
    metrics than those that are asked for."""
    sums = np.array(reply.sums if reply.sums is not None else np.nan)
    in_order = (sums >= 0).all() and (sums <= LARGEST).all() and (sums[:, 1] <= sums[:, 2]).all()
    if not in_order:
        raise WireError(
            f"its results can't be: {reply.sums}; each split has a loss, hits and predictions: "
            "finite, not negative, and no more hits than predictions"
        )
    examples = [federation.num_rows(reply.client, split) for split in SPLITS]
    for said, counted in zip(sums[:, 2].tolist(), examples, strict=True):
        most = counted * (_MOST_TOKENS if federation.dataset.objective.per_token else 1)
        if said != counted and not (most > counted and said <= most):
            raise WireError(f"its results are of {sums[:, 2].tolist()} examples, not of {examples}")
    if not metrics.asked:
        return ClientEvaluationResult(sums, None)
    classes = federation.dataset.num_classes
    pairs = zip(reply.metrics, examples, strict=False)
    if len(reply.metrics) != len(sums) or not all(_can_be(*p, metrics, classes) for p in pairs):
        raise WireError(
            f"its metrics can't be: {reply.metrics}; each split has {len(metrics.names)} finite "
            "values, and counts by class that are no more than its examples"
        )
    return ClientEvaluationResult(sums, None, reply.metrics)


def _can_be(of_split: MetricValues, examples: int, metrics: Metrics, classes: int) -> bool:
    values, counts = of_split.values, of_split.confusion
    if len(values) != len(metrics.names) or (counts is None) == metrics.config.confusion:
        return False
    if not all(value is None or abs(value) <= LARGEST for value in values):
        return False
    if counts:
        cells = [cell for row in counts for cell in row]
        square = [len(row) for row in counts] == [classes] * classes
        return square and min(cells) >= 0 and sum(cells) <= examples
    return counts is None or not examples
