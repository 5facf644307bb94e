"""FedProx by hand: softmax regression, two clients, three steps each, in NumPy."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.golden import linear_backbone, softmax_gradient
from tests.small import digits_backbone, digits_federation

from fedtailor.client import client_round
from fedtailor.engine import Plan, rounds
from fedtailor.errors import InputError
from fedtailor.experiment import parse
from fedtailor.federation import LocalConfig
from fedtailor.method import Cohort
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedprox import FedProx
from fedtailor.optim import Context, Optimiser
from fedtailor.params import Params, stack
from fedtailor.random import key
from fedtailor.task import Task

W = np.array([[0.1, -0.2], [0.3, 0.4]], dtype=np.float32)
X = [np.array([[1.0, 2.0]]), np.array([[-1.0, 0.5], [0.0, 1.0], [2.0, 2.0]])]
Y = [np.array([0]), np.array([1, 0, 1])]


def test_one_round_follows_equation_2() -> None:
    eta, mu = 0.5, 0.8
    method = FedProx(mu=mu, optimiser=Optimiser("sgd", lr=eta))
    task = Task(linear_backbone(W), method.adapt)
    expected, uploads = np.zeros_like(W, dtype=np.float64), []
    for share, x, y in zip([0.25, 0.75], X, Y, strict=True):
        w = W.astype(np.float64)
        for _ in range(3):
            w = w - eta * (softmax_gradient(w, x, y) + mu * (w - W))
        expected += share * w
        batch = {"x": torch.tensor(x).float(), "labels": torch.tensor(y)}
        upload, kept, _ = client_round(method, task, task.state, {}, [batch] * 3, Context(key(0)))
        assert not kept
        uploads.append(upload)
    cohort = Cohort((0, 1), torch.tensor([1.0, 3.0], dtype=torch.float64), 1, key(0))
    got = method.aggregate(task, task.state, stack(uploads), cohort)["linear.weight"]
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-6)


def last_server(method: FedAvg | FedProx) -> Params:
    task = Task(digits_backbone(), method.adapt)
    plan = Plan(rounds=2, local=LocalConfig(batch_size=8))
    *_, last = rounds(method, task, digits_federation(), plan)
    return last.server


def test_without_the_term_it_is_fedavg() -> None:
    sgd = Optimiser("sgd", lr=0.05, momentum=0.9)
    ours = last_server(FedProx(mu=0.0, optimiser=sgd, layers=("h*", "norm")))
    theirs = last_server(FedAvg(optimiser=sgd, layers=("h*", "norm")))
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)


def test_a_larger_mu_stays_nearer() -> None:
    start = Task(digits_backbone()).state

    def drift(mu: float) -> float:
        server = last_server(replace(FedProx(optimiser=Optimiser(lr=0.05)), mu=mu))
        return sum((server[n] - start[n]).square().sum().item() for n in ("conv.weight",))

    assert drift(10.0) < 0.5 * drift(0.0)


def test_a_negative_mu_is_refused() -> None:
    with pytest.raises(InputError, match=r"methods\.fedprox\.mu = -1.*greater than or equal to 0"):
        parse({"methods": {"fedprox": {"mu": -1}}})
