"""Several clients at once, as many as fit and pay; what they do is tested with the methods."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.engine.executors.vectorised import AdaptiveChunk, Vectorised
from fedtailor.engine.executors.work import ClientInputs, ClientRequest, ClientWork, Executor
from fedtailor.optim import ClientContext
from fedtailor.params import Params
from fedtailor.torch_private import under_vmap
from tests.small import digits_federation


@dataclass(frozen=True)
class Doubling(ClientWork):
    """Doubles what a client keeps, for at most ``room`` clients at once."""

    room: int
    ran: list[int] = field(default_factory=list)

    def prepare(self, server: Params, request: ClientRequest, drawn: Any = None) -> ClientInputs:
        return ClientInputs(
            {}, request.private, [], ClientContext(torch.zeros(2, dtype=torch.long)), 0.0
        )

    def run(self, received: Params, private: Params, steps: Any, context: ClientContext) -> Any:
        clients = len(torch._C._functorch.get_unwrapped(private["x"])) if under_vmap() else 1
        self.ran.append(clients)
        if clients > self.room:
            raise torch.OutOfMemoryError(f"{clients} clients")
        return 2 * private["x"]

    def finish(
        self, request: ClientRequest, job: ClientInputs, outcome: Any, cpu_seconds: float
    ) -> Any:
        return outcome.item()


def doubled(executor: Executor, clients: int) -> list[float]:
    requests = [
        ClientRequest(k, 1, {"x": torch.tensor(float(k))}, "train", 1, 1.0, 1)
        for k in range(clients)
    ]
    return [result for _, result in executor.map("double", {}, requests)]


def test_clients_that_do_not_fit_together_run_in_halves() -> None:
    work = Doubling(room=3)
    executor = Vectorised({"double": work}, AdaptiveChunk(8, tries=(8, 8)))
    assert doubled(executor, 13) == [2.0 * k for k in range(13)]
    assert work.ran == [8, 4, 2, 2, 4, 2, 2, 2, 2, 1]
    assert executor.name == "vectorised-2"
    with pytest.raises(torch.OutOfMemoryError, match="1 clients"):
        doubled(Vectorised({"double": Doubling(room=0)}, 1), 2)
    with pytest.raises(torch.OutOfMemoryError, match="8 clients"):  # as many as were asked for
        doubled(Vectorised({"double": work}, 8), 13)


@pytest.mark.parametrize(
    ("alone", "together", "room", "found"),
    [(3.0, 2.0, 40, 40), (2.0, 3.0, 40, 1), (3.0, 2.0, 3, 3), (3.0, 2.0, 1, 1), (3.0, 2.0, 0, 1)],
)
def test_as_many_at_once_as_fit_or_one_if_that_is_faster(
    alone: float, together: float, room: int, found: int
) -> None:
    chunk = AdaptiveChunk()
    for pace in (99.0, 50.0, alone, 99.0, 50.0, together):  # the first ones start things up
        assert not chunk.settled
        chunk.ran(chunk.size - 1, 0.0, room)  # fewer say nothing
        chunk.ran(chunk.size, pace, room)
    assert (chunk.settled, chunk.size) == (True, found)


def test_a_small_cohort_tells_as_well() -> None:
    chunk = AdaptiveChunk()
    for _ in range(3):
        chunk.ran(1, 3.0, 40)
    for pace in (9.0, 5.0, 2.0):
        chunk.ran(3, pace, 40, all_there=True)
    assert (chunk.settled, chunk.size) == (True, 40)
    for clients in range(1, 4):
        chunk.ran(clients, 0.0, 1, all_there=True)  # a chosen or given size stays
    assert chunk.size == 40
    one = AdaptiveChunk()
    for _ in range(4):
        one.ran(1, 1.0, 40, all_there=True)
    assert (one.settled, one.size) == (True, 1)


class LooksAtValues(nn.Module):
    """A network whose forward depends on the values of its input, as some models' masks do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, pixel_values: Tensor) -> Tensor:
        x = pixel_values.flatten(1)
        return self.head(x if x.sum() > 0 else -x)  # type: ignore[no-any-return]


def test_a_model_that_vmap_cannot_follow_runs_one_client_after_the_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    servers = []
    for executor in ("sequential", "vectorised"):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            task = ft.Task(ft.from_module(LooksAtValues()))
        plan = ft.Plan(2, engine=ft.EngineConfig(executor))  # type: ignore[arg-type]
        *_, done = ft.rounds(ft.FedAvg(), task, digits_federation(), plan)
        servers.append(done.server)
        assert done.executor == "sequential"
    assert all(value.equal(servers[1][name]) for name, value in servers[0].items())
    assert capsys.readouterr().err.count("clients run one after the other, since torch.func") == 1
