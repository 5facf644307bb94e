"""A Grid without a network: its nodes are ClientApps in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MessageType,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedtailor.data.table import Dataset
from fedtailor.engine.metrics import MetricFunction
from fedtailor.errors import InputError
from fedtailor.flower import Timeouts, client_app
from fedtailor.flower.codec import Limits, pack, unpack
from fedtailor.flower.messages import RoundReply, RoundRequest
from fedtailor.runs.experiment import Experiment, parse
from fedtailor.task.backbone import Backbone
from tests.small import digits, digits_backbone

Change = Callable[[Message, Message], Message | None]  # of a message's answer; None: it is late


@dataclass
class DirectGrid(Grid):
    """``apps`` by node; ``sent`` and ``answered`` are all messages so far. Messages to ``lost``
    nodes are not stored."""

    apps: dict[int, tuple[ClientApp, dict[str, Any]]]
    change: Change = lambda message, reply: reply
    sent: list[Message] = field(default_factory=list)
    answered: list[Message] = field(default_factory=list)
    waiting: dict[str, Message] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    _run: Any = None

    def __post_init__(self) -> None:
        # what Flower's own processes are told on their command line; private to Flower
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1

    def set_run(self, run: Any) -> None:
        self._run = run

    @property
    def run(self) -> Any:
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str = "",
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def get_node_ids(self) -> Iterable[int]:
        return list(self.apps)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        numbers = []
        for message in messages:
            if message.metadata.dst_node_id in self.lost:
                numbers.append("")
                continue
            number = f"message {len(self.sent)}"
            message.metadata.__dict__["_message_id"] = number
            self.sent.append(message)
            reply = self.change(message, self._answer(message))
            if reply is not None:
                self.answered.append(reply)
                self.waiting[number] = reply
            numbers.append(number)
        return numbers

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        app, config = self.apps[node]
        try:
            return app(message, Context(1, node, config, RecordDict(), {}))
        except InputError as error:  # as a node answers what its app raises
            return Message(Error(2, f"{type(error).__name__}: {error}"), reply_to=message)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [self.waiting.pop(number) for number in message_ids if number in self.waiting]


def experiment(method: str, fields: dict[str, Any] | None = None, **more: Any) -> Experiment:
    """Three rounds of three of five ragged clients on the digits."""
    content = {
        "name": "test",
        "rounds": 3,
        "methods": {method: fields or {}},
        "split": {"clients": 5, "scheme": "dirichlet", "min_examples": 6, "max_examples": 14},
        "local": {"batch_size": 8},
        "cohort": {"size": 3},
        "engine": {"executor": "sequential", "device": "cpu"},
        "evaluate": {"every": 3},
        **more,
    }
    return parse(content)


def grid(
    chosen: Experiment,
    folder: Path,
    nodes: int = 2,
    dataset: Dataset | None = None,
    metrics: Mapping[str, MetricFunction] | None = None,
    tell_labels: bool = False,
    model: Callable[[], Backbone] = digits_backbone,
) -> Any:
    """A grid of ``nodes`` that keep their private states under ``folder``."""
    apps: dict[int, tuple[ClientApp, dict[str, Any]]] = {}
    for node in range(nodes):
        app = client_app(
            chosen,
            folder / f"node-{node}",
            data=DIGITS if dataset is None else dataset,
            backbone=model(),
            metrics=metrics,
            tell_labels=tell_labels,
        )
        apps[100 + node] = app, {"partition-id": node, "num-partitions": nodes}
    return DirectGrid(apps)


DIGITS = digits()


ANY = Limits(1 << 30, 1 << 30, 1 << 30)

QUICK = Timeouts(start=0.2, reply=0.2, least=0.25, poll=0.02)


def orders(direct: DirectGrid, number: int) -> list[RoundRequest]:
    """The orders to train in a round."""
    kind = MessageType.TRAIN
    sent = [message for message in direct.sent if message.metadata.message_type == kind]
    orders = [unpack(message.content, RoundRequest, ANY)[0] for message in sent]
    return [order for order in orders if order.round == number]


def rewritten(content: RecordDict, what: str) -> RecordDict:
    about, arrays = content["about"], content["payloads"]
    assert isinstance(about, ConfigRecord)
    assert isinstance(arrays, ArrayRecord)
    if what == "schema":
        return RecordDict({**content, "about": ConfigRecord({**about, "schema": 10})})
    if what == "bytes":
        data = arrays["0"].data[:-1] + bytes([arrays["0"].data[-1] ^ 1])
        array = Array("uint8", (len(data),), "safetensors", data)
        return RecordDict({**content, "payloads": ArrayRecord({"0": array})})
    report, (sent,) = unpack(content, RoundReply, ANY)
    (result,) = report.results
    if what == "shape":
        sent["conv.weight"] = sent["conv.weight"][1:]
    elif what == "missing":
        del sent["conv.weight"]
    elif what == "values":
        sent["conv.weight"][0] = torch.nan
    elif what == "loss":
        result = replace(result, loss=float("nan"))
    elif what == "client":
        result = replace(result, client=77)
    number = 3 if what == "round" else report.round
    return pack(replace(report, round=number, results=(result,)), [sent])
