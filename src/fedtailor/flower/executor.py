"""A Grid as an executor of the engine: requests to clients become messages to their nodes.

A round goes on without clients that don't reply in time or whose replies can't be used. Each is
named in a line on stderr and in ``refused.jsonl``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from flwr.app import MessageType, RecordDict

from ..data.federation import Federation
from ..engine.client import ClientEvaluationResult, ClientUpdate
from ..engine.costs import measure
from ..engine.executors.work import ClientRequest, Executor, Refusal
from ..engine.metrics import Metrics
from ..errors import naming, say
from ..method import Method
from ..params import Params, same_tensors, to_device
from ..store.client_states import StoredStates
from ..store.format import REFUSED_FILE
from ..task.task import Task
from ..uploads.chain import Chain
from .border import Answer, accept_upload, evaluation_of, read_answers, reply_limits
from .codec import WireError, pack
from .messages import STEPS, ClientReply, Kind, Masking, RoundRequest, WireRequest
from .nodes import Nodes, Timeouts
from .schema import UploadSchema

T = TypeVar("T")


class RemoteStates(StoredStates):
    """Private states that stay at the clients' sites. The server knows only each client's last
    committed round, which says from which state the client goes on, and its last one up to the best
    round of the run so far, whose state the site keeps, too."""

    has_states: bool = False
    staged: tuple[int, ...] = ()

    def __init__(self, has_states: bool) -> None:
        self._last_rounds: dict[int, int] = {}
        self._best_rounds: dict[int, int] = {}  # of clients that have trained since the best round
        self._best = 0  # the best round; 0: none
        self._staged: dict[int, int] = {}  # the round that is staged, by client
        self._round = 0
        self.has_states = has_states

    @classmethod
    def after(
        cls, cohorts: Iterable[tuple[int, Sequence[int]]], best: int, has_states: bool
    ) -> RemoteStates:
        """As they stand after the rounds of a run, each with its cohort, of which ``best`` is the
        best one; 0: none."""
        states = cls(has_states)
        states.keep(best)
        for round_, clients in cohorts:
            states.begin(round_)
            for client in clients:
                states.stage(client, None)
            states.commit()
        return states

    def last_round(self, client: int) -> int:
        """The last round with the client that counts; 0 if there is none."""
        return self._staged.get(client, self._last_rounds.get(client, 0))

    def best_round(self, client: int) -> int:
        """The last round up to the best one with the client that counts; 0 if there is none."""
        return self._best_rounds.get(client, self.last_round(client))

    def begin(self, round_: int) -> None:
        self._round, self._staged = round_, {}

    def stage(self, client: int, state: Params | None) -> None:
        self._staged[client] = self._round

    def unstage(self, client: int) -> None:
        self._staged.pop(client, None)

    def discard(self) -> None:
        self._staged = {}

    @property
    def checksums(self) -> dict[str, str]:
        """None: states have theirs at the sites."""
        return {}

    def keep(self, round_: int) -> None:
        if round_ != self._best:
            self._best, self._best_rounds = round_, {}

    def commit(self) -> None:
        if 0 < self._best < self._round:
            for client in self._staged:
                self._best_rounds.setdefault(client, self._last_rounds.get(client, 0))
        self._last_rounds |= self._staged
        self._staged = {}


@dataclass
class GridExecutor(Executor):
    """Runs the work of one method with one seed at the nodes of a Grid. ``blank`` is a message of
    this trial, without what changes; ``folder`` is the trial's directory, for ``refused.jsonl``;
    ``first_private`` is a client's first private state, whose size is counted."""

    method: Method
    task: Task
    federation: Federation
    chain: Chain
    states: RemoteStates
    first_private: Params
    schema: UploadSchema
    nodes: Nodes
    timeouts: Timeouts
    blank: RoundRequest
    folder: Path
    metrics: Metrics = Metrics()
    masking: Masking | None = None  # of the round, where the server is to see sums alone

    name = "flower"

    def map(self, name: str, server: Params, items: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        """(request, `ClientUpdate`, `ClientEvaluationResult` or `Refusal`), as nodes reply; for
        "keep" the request alone where the model is kept."""
        requests: dict[int, ClientRequest] = {item.client: item for item in items}
        if not requests:
            return
        kind = cast(Kind, "personal" if name == "evaluate" else name)
        any_request = next(iter(requests.values()))
        message = replace(self.blank, round=any_request.round, kind=kind)
        if kind == "train":
            message = replace(message, masking=self.masking, clip=any_request.clip)
            for problem in self.nodes.refresh():
                say(f"{_title(message)}: {problem}")
        send: Callable[[int], Params] = partial(self.method.send, self.task, server)
        if kind == "global":
            send = lambda client: server  # noqa: E731

        def read(
            client: int, reply: ClientReply, payload: Params
        ) -> ClientUpdate | ClientEvaluationResult | None:
            if kind == "keep":
                return None
            if kind != "train":
                return evaluation_of(reply, self.metrics, self.federation)
            received, packed = send(client), to_device(payload, self.task.device)
            how = self.method, self.task, self.chain, self.schema
            accept_upload(*how, received, requests[client], reply, packed)
            sizes = self.method, self.task, received, self.first_private, payload
            costs = measure(*sizes, masked=self.chain.hidden)
            return ClientUpdate(packed, None, reply.loss or 0.0, None, costs, 0.0, 0.0)

        orders = {client: request.masks for client, request in requests.items()}
        for client, result in self._results(message, sorted(requests), send, orders, read):
            yield requests[client], result

    def ask(
        self,
        message: RoundRequest,
        clients: Sequence[int],
        read: Callable[[int, ClientReply, Params], T],
        payload: Params | None = None,
        orders: Mapping[int, Any] | None = None,
    ) -> Iterator[tuple[int, T]]:
        """What ``read`` makes of the clients' answers to a step of secure aggregation, as far as
        they can be used; each is sent the same ``payload``."""
        sent = payload or {}
        for client, result in self._results(message, clients, lambda _: sent, orders or {}, read):
            if not isinstance(result, Refusal):
                yield client, result

    def _results(
        self,
        message: RoundRequest,
        clients: Sequence[int],
        send: Callable[[int], Params],
        orders: Mapping[int, Any],
        read: Callable[[int, ClientReply, Params], T],
    ) -> Iterator[tuple[int, T | Refusal]]:
        """What ``read`` makes of the clients' answers, which a WireError refuses."""
        for client, answer in self._replies(message, clients, send, orders):
            result: T | Refusal
            try:
                result = answer if isinstance(answer, Refusal) else read(client, *answer)
            except WireError as error:
                result = Refusal(str(error))
            if isinstance(result, Refusal):
                self._log(message, client, result.reason)
            yield client, result

    def _replies(
        self,
        message: RoundRequest,
        clients: Sequence[int],
        send: Callable[[int], Params],
        orders: Mapping[int, Any],
    ) -> Iterator[tuple[int, Answer]]:
        by_node: dict[int, list[int]] = {}
        for client in clients:
            if client in self.nodes.node_of:
                by_node.setdefault(self.nodes.node_of[client], []).append(client)
            else:
                yield client, Refusal("no node serves it")
        contents = ((node, self._content(message, k, send, orders)) for node, k in by_node.items())
        kind = MessageType.TRAIN if message.kind == "train" else MessageType.EVALUATE
        limit = self.timeouts.reply
        if message.kind in STEPS:  # which take no training
            limit = min(limit, self.timeouts.query)
        for node, content in self.nodes.ask(kind, contents, str(message.round), limit):
            asked = by_node[node]
            classes = self.federation.dataset.num_classes if self.metrics.config.confusion else 0
            limits = reply_limits(message, len(asked), self.schema, classes)
            yield from read_answers(node, content, message, asked, limits).items()

    def _content(
        self,
        message: RoundRequest,
        clients: Sequence[int],
        send: Callable[[int], Params],
        orders: Mapping[int, Any],
    ) -> RecordDict:
        """The message for one node; what several clients receive stands there once."""
        payloads: list[Params] = []
        requests = []
        for client in clients:
            received = send(client)
            same = (at for at, other in enumerate(payloads) if same_tensors(other, received))
            place = next(same, len(payloads))
            if place == len(payloads):
                payloads.append(received)
            last, best = self.states.last_round(client), self.states.best_round(client)
            base = best if message.kind == "keep" else last
            requests.append(WireRequest(client, base, best, place, orders.get(client)))
        return pack(replace(message, requests=tuple(requests)), payloads)

    def _log(self, message: RoundRequest, client: int, reason: str) -> None:
        say(f"{_title(message)}: without client {client}: {reason}")
        line = json.dumps({"round": message.round, "client": client, "reason": reason})
        log = self.folder / REFUSED_FILE
        with naming(log), log.open("a") as file:
            file.write(line + "\n")


def _title(message: RoundRequest) -> str:
    return f"{message.label}, seed {message.seed}, round {message.round}"
