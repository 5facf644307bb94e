"""What a client hands back is looked at before it counts."""

import torch
from torch import Tensor

from fedtailor.data.config import LocalConfig
from fedtailor.engine.client import Training
from fedtailor.engine.config import Plan
from fedtailor.engine.executors.work import client_requests
from fedtailor.engine.prepare import first_server, upload_chain
from fedtailor.methods.fedavg import FedAvg
from fedtailor.task.task import Task
from tests.small import digits_backbone, digits_federation

INF, HUGE = torch.inf, torch.finfo().max


def what_is_wrong(values: Tensor, loss: float = 1.0) -> str | None:
    method, federation = FedAvg(), digits_federation()
    task = Task(digits_backbone(), method.adapt)
    server = first_server(method, task, federation)
    chain = upload_chain(method, task, federation, Plan(rounds=1))
    training = Training(method, task, federation, LocalConfig(), None, chain)
    (turn,) = client_requests([3], 1, "train", 1, {3: 1}, lambda client: {})
    job = training.prepare(server, turn)
    outcome = {**server, "w": values}, {}, torch.tensor(loss), torch.tensor(False)
    update = training.finish(turn, job, outcome, 0.0)
    return None if update.refusal is None else update.refusal.reason


def test_values_that_are_not_finite_are_named() -> None:
    spoilt = "client 3 has trained w to values that are not finite"
    assert what_is_wrong(torch.tensor([1.0, INF, -INF])) == spoilt
    assert what_is_wrong(torch.tensor([1.0, torch.nan])) == spoilt
    assert what_is_wrong(torch.tensor([1.0, INF], dtype=torch.bfloat16)) == spoilt
    assert what_is_wrong(torch.tensor([1.0]), torch.nan) == "the loss of client 3 is nan"


def test_finite_values_may_be_too_large_for_a_sum() -> None:
    assert what_is_wrong(torch.tensor([HUGE, HUGE])) is None
    assert what_is_wrong(torch.tensor([[True], [False]])) is None
    assert what_is_wrong(torch.zeros(0)) is None
