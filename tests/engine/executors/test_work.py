"""A client's request, and work on it in three parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fedtailor import random
from fedtailor.data.config import LocalConfig
from fedtailor.engine.config import EngineConfig, Plan
from fedtailor.engine.executors.work import (
    ClientInputs,
    ClientRequest,
    ClientWork,
    client_requests,
)
from fedtailor.engine.rounds import rounds
from fedtailor.methods import METHODS
from fedtailor.optim import ClientContext
from fedtailor.params import Batch, Params
from fedtailor.task.task import Task
from tests.small import digits_backbone, digits_federation


def test_a_clients_private_state_is_read_when_its_turn_comes() -> None:
    read = []

    def private(client: int) -> Params:
        read.append(client)
        return {"x": torch.tensor(client)}

    requests = client_requests([7, 3], 5, "train", 2, {3: 30, 7: 70}, private)
    assert read == []
    first = next(requests)
    assert read == [7]
    assert (first.client, first.size) == (7, 70)
    assert (first.round, first.purpose, first.passes, first.lr_scale) == (5, "train", 2, 1.0)
    assert first.private["x"] == 7
    (second,) = requests
    assert (second.client, second.size) == (3, 30)


@dataclass(frozen=True)
class Sums(ClientWork):
    """Adds up what a client receives, keeps and has as a batch."""

    parts: list[str] = field(default_factory=list)

    def prepare(self, server: Params, request: ClientRequest, drawn: Any = None) -> ClientInputs:
        self.parts.append("prepare")
        batch = {"x": torch.tensor(100.0)}
        context = ClientContext(random.key(0))
        return ClientInputs(server, request.private, [batch], context, 0.0, cpu_seconds=500.0)

    def run(
        self, received: Params, private: Params, batches: Sequence[Batch], context: ClientContext
    ) -> Any:
        self.parts.append("run")
        return received["x"] + private["x"] + batches[0]["x"]

    def finish(
        self, request: ClientRequest, inputs: ClientInputs, outcome: Any, cpu_seconds: float
    ) -> Any:
        self.parts.append("finish")
        return request.client, outcome.item(), cpu_seconds // 100


def test_work_on_one_client_is_its_three_parts() -> None:
    work, server = Sums(), {"x": torch.tensor(1.0)}
    assert work.together
    (request,) = client_requests([4], 1, "train", 1, {4: 1}, lambda k: {"x": torch.tensor(10.0)})
    assert work.one(server, request) == (4, 111.0, 5)  # preparing batches takes time, too
    assert work.parts == ["prepare", "run", "finish"]
    given = work.prepare({"x": torch.tensor(2.0)}, request)  # as a node that was sent its share
    assert work.complete(request, given) == (4, 112.0, 5)


def test_each_result_of_a_round_is_counted() -> None:
    method, federation = METHODS["local"](), digits_federation()
    told: list[tuple[str, int]] = []
    plan = Plan(1, LocalConfig(steps=1), engine=EngineConfig(executor="vectorised"))
    task = Task(digits_backbone(), method.adapt)
    (done,) = rounds(
        method, task, federation, plan, on_result=lambda work, count: told.append((work, count))
    )
    assert told == [(work, n) for work in ("train", "evaluate") for n in range(1, 6)]
    assert done.executor == "vectorised"
