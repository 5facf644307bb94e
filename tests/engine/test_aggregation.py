"""From uploads to the server's next state: weights, and what is left out of it."""

import math
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from fedtailor.engine.aggregation import NextState, next_state
from fedtailor.engine.config import CohortConfig, Plan
from fedtailor.engine.prepare import upload_chain
from fedtailor.method import Cohort, Method
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedsdg import FedSDG
from fedtailor.methods.hetlora import HetLoRA
from fedtailor.params import Params, stack
from fedtailor.random import key
from fedtailor.task.task import Task
from fedtailor.uploads.collected import UploadStack
from fedtailor.uploads.rules import Robust
from tests.small import digits_backbone, digits_federation


def after(method: Method, server: Params, uploads: list[Params], least: int) -> NextState:
    """The next state, from one upload of each client."""
    task, clients = Task(digits_backbone()), range(len(uploads))
    stacked = UploadStack(len(uploads), 1e9)
    for place, upload in enumerate(uploads):
        stacked.put(place, upload)
    n = torch.ones(len(uploads), dtype=torch.float64)
    cohort = Cohort(tuple(clients), n, 1, key(0), num_clients=len(uploads))
    plan = Plan(rounds=1, cohort=CohortConfig(above_norm="keep"))
    chain = upload_chain(method, task, digits_federation(), plan)
    at = chain.at(server, 1, clients)
    return next_state(method, task, chain, stacked, cohort, at, least=least)


@pytest.mark.parametrize(
    ("examples", "max_share", "expected"),
    [
        ([1e9, 30, 10], None, [1e9, 30, 10]),
        ([1e9, 30, 10], 0.5, [40, 30, 10]),  # 40 of 80
        ([1e9, 1e6, 10, 10], 0.4, [40, 40, 10, 10]),
        ([30, 30, 40], 0.5, [30, 30, 40]),
        ([1e9, 30, 10], 0.2, [1, 1, 1]),  # as equal as can be
    ],
)
def test_no_client_weighs_more_than_its_share(
    examples: list[float], max_share: float | None, expected: list[float]
) -> None:
    numbers = torch.tensor(examples, dtype=torch.float64)
    cohort = Cohort(tuple(range(len(examples))), numbers, 1, torch.zeros(2))
    assert cohort.with_max_share(max_share).num_examples.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([0.9, 0.05, 0.03, 0.02], [0.4, 0.3, 0.18, 0.12]),
        ([2.0, 0.0, 0.0, 0.0], [0.8, 0.4, 0.4, 0.4]),  # others have none: they get the rest
        ([0.4, 0.4, 0.2, 0.0], [0.4, 0.4, 0.2, 0.0]),
        ([0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]),
        ([math.nan, 0.1, 0.1, 0.1], [math.nan, 0.1, 0.1, 0.1]),  # the round is taken again
        ([math.inf, 0.1, 0.1, 0.1], [math.inf, 0.1, 0.1, 0.1]),
    ],
)
def test_weights_of_a_methods_own_have_the_limit(
    weights: list[float], expected: list[float]
) -> None:
    n = torch.ones(4, dtype=torch.float64)
    cohort = Cohort((0, 1, 2, 3), n, 1, key(0)).with_max_share(0.4)
    own = torch.tensor(weights, dtype=torch.float64)
    assert cohort.limited(own).tolist() == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("method", [FedSDG(rank=2), HetLoRA(rank=2)])
def test_a_long_upload_has_no_more_than_the_limit(method: Method) -> None:
    task = Task(digits_backbone(), method.adapt)
    server = method.init_server(task, 4, key(0))
    sent = {name: torch.zeros_like(server[name]) for name in server if name in task.state}
    if isinstance(method, HetLoRA):
        sent["rank"] = torch.tensor(2)
    rows = [dict(sent) for _ in range(4)]
    factors = [name for name in sent if name.endswith((".A", ".B", "default.weight"))]
    for at, row in enumerate(rows):
        row |= {name: torch.full_like(row[name], -1e-3 if at else 1e3) for name in factors}
    cohort = Cohort((0, 1, 2, 3), torch.ones(4).double(), 1, key(0)).with_max_share(0.25)
    new = method.aggregate(task, server, stack(rows), cohort)
    for name in factors:
        before = server[name] if method.sends_updates else 0
        assert (new[name] - before).max() == pytest.approx(250, rel=1e-3)


def test_a_state_above_all_measure_is_not_committed() -> None:
    uploads: list[Params] = [{"w": torch.full((2,), value)} for value in (1.0, -4e18, 2.0)]
    found = after(FedAvg(), {"w": torch.zeros(2)}, uploads, least=2)
    assert found.present == (0, 2)
    assert found.left_out == {
        1: "with its upload, w of the server's next state has values above 1e+18"
    }
    assert found.server["w"].tolist() == [1.5, 1.5]


@dataclass(frozen=True)
class Divides(Method):
    """Its aggregate divides by a number of each upload."""

    name: ClassVar[str] = "divides"

    def aggregate(self, task: Task, server: Params, uploads: Params, cohort: Cohort) -> Params:
        return {"w": (uploads["w"] / uploads["by"][:, None]).mean(0)}


def test_the_upload_that_spoils_the_state_is_left_out_though_its_values_are_small() -> None:
    uploads: list[Params] = [
        {"w": torch.full((2,), 3.0 - place), "by": torch.tensor(by)}
        for place, by in enumerate((1.0, 0.0, 1e-25))
    ]
    found = after(Divides(), {"w": torch.zeros(2)}, uploads, least=1)
    assert found.present == (0,)
    assert found.server["w"].tolist() == [3.0, 3.0]


@pytest.mark.parametrize("robust", [Robust(before=("bucketing",)), Robust("trimmed-mean")])
def test_a_round_is_taken_again_where_one_upload_is_made_of_all(robust: Robust) -> None:
    values = (1.0, 1e30, 2.0, 3.0, 2.0)
    uploads: list[Params] = [{"w": torch.full((2,), value)} for value in values]
    found = after(FedAvg(robust=robust), {"w": torch.zeros(2)}, uploads, least=2)
    assert found.present == (0, 2, 3, 4)
    assert found.server["w"].tolist() == [2.0, 2.0]
