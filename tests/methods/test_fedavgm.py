"""FedAvgM by hand: softmax regression, two clients, two rounds, in NumPy."""

import numpy as np
import pytest
import torch

from fedtailor.errors import InputError
from fedtailor.method import Cohort
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedavgm import FedAvgM
from fedtailor.optim import Optimiser
from fedtailor.params import stack, strip_prefix
from fedtailor.runs.experiment import parse
from fedtailor.task.task import Task
from tests.golden import SIZES, X, Y, linear_backbone, one_round, softmax_gradient
from tests.small import digits_backbone, last_round

W = np.array([[0.1, -0.2], [0.3, 0.4]], dtype=np.float32)


@pytest.mark.parametrize(("beta", "gamma"), [(0.9, 1.0), (0.5, 0.3)])
def test_two_rounds_follow_the_equations(beta: float, gamma: float) -> None:
    eta = 0.5
    method = FedAvgM(momentum=beta, server_lr=gamma, optimiser=Optimiser("sgd", lr=eta))
    task = Task(linear_backbone(W), method.adapt)
    w, v = W.astype(np.float64), np.zeros((2, 2))
    server = method.init_server(task, 2, torch.tensor(0))
    for _ in range(2):
        delta = np.zeros((2, 2))
        for share, x, y in zip([0.25, 0.75], X, Y, strict=True):
            w_k = w
            for _ in range(3):
                w_k = w_k - eta * softmax_gradient(w_k, x, y)
            delta += share * (w - w_k)
        v = beta * v + delta
        w = w - gamma * v
        server, kept = one_round(method, task, server, [{}, {}])
        assert kept == [{}, {}]
    np.testing.assert_allclose(server["linear.weight"].numpy(), w, atol=1e-6)
    assert method.send(task, server, 0).keys() == task.state.keys()
    assert method.global_state(task, server).keys() == task.state.keys()


@pytest.mark.slow
def test_without_momentum_and_at_rate_1_it_is_fedavg() -> None:
    sgd = Optimiser("sgd", lr=0.05, momentum=0.9)
    ours, _ = last_round(FedAvgM(momentum=0.0, optimiser=sgd, layers=("h*", "norm")))
    theirs, _ = last_round(FedAvg(optimiser=sgd, layers=("h*", "norm")))
    for name, value in theirs.server.items():
        torch.testing.assert_close(ours.server[name], value, atol=1e-6, rtol=1e-6)


def test_running_statistics_are_averaged_plainly() -> None:
    method = FedAvgM(server_lr=0.1)
    task = Task(digits_backbone(), method.adapt)
    server = method.init_server(task, 2, torch.tensor(0))
    uploads = stack([{name: value + 1 for name, value in task.state.items()}] * 2)
    cohort = Cohort((0, 1), SIZES, 1, torch.tensor(0))
    for _ in range(2):
        server = method.aggregate(task, server, uploads, cohort)
        assert server["norm.running_mean"].equal(task.state["norm.running_mean"] + 1)
        assert server["norm.weight"].max() < task.state["norm.weight"].min() + 0.3


def test_a_momentum_of_one_is_refused() -> None:
    with pytest.raises(InputError, match=r"methods\.fedavgm\.momentum = 1.*less than 1"):
        parse({"methods": {"fedavgm": {"momentum": 1}}})


def test_what_is_trained_has_momentum() -> None:
    method = FedAvgM(trainable="lora", rank=2, lora_alpha=8.0)
    task = Task(digits_backbone(), method.adapt)
    server = method.init_server(task, 2, torch.tensor(0))
    assert strip_prefix(server, "server.v.").keys() == task.trained
    B = "hidden.lora_B.default.weight"
    A, scaled = method.lora(task, {**task.state, B: task.state[B] + 1})["hidden"]
    assert len(A) == 2
    assert scaled.max() == 4.0
