"""FedAdagrad, FedAdam and FedYogi by hand: two clients, two rounds, in NumPy."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedtailor.errors import InputError
from fedtailor.method import Cohort, Method
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedopt import FedAdagrad, FedAdam, FedYogi
from fedtailor.optim import Optimiser
from fedtailor.params import stack, strip_prefix
from fedtailor.runs.experiment import parse
from fedtailor.task.task import Task
from tests.golden import SIZES, X, Y, linear_backbone, one_round, softmax_gradient
from tests.small import digits_backbone, last_round

W = np.array([[0.1, -0.2], [0.3, 0.4]], dtype=np.float32)
SGD = Optimiser("sgd", lr=0.5)

CASES = [  # method, eta, beta1, beta2, tau
    (FedAdagrad(optimiser=SGD), 0.01, 0.0, None, 1e-3),
    (FedAdagrad(optimiser=SGD, server_lr=0.1, beta1=0.6, tau=0.2), 0.1, 0.6, None, 0.2),
    (FedAdam(optimiser=SGD), 0.01, 0.9, 0.99, 1e-3),
    (FedAdam(optimiser=SGD, server_lr=0.1, beta1=0.6, beta2=0.7, tau=0.2), 0.1, 0.6, 0.7, 0.2),
    (FedYogi(optimiser=SGD), 0.01, 0.9, 0.99, 1e-3),
    (FedYogi(optimiser=SGD, server_lr=0.1, beta1=0.6, beta2=0.7, tau=0.2), 0.1, 0.6, 0.7, 0.2),
]


def mean_change(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Delta: both clients' three steps from x, weighed by their examples."""
    total = np.zeros_like(x)
    for share, inputs, labels in zip([0.25, 0.75], X, Y, strict=True):
        x_i = x
        for _ in range(3):
            x_i = x_i - SGD.lr * softmax_gradient(x_i, inputs, labels)
        total += share * (x_i - x)
    return total


@pytest.mark.parametrize(("method", "eta", "beta1", "beta2", "tau"), CASES)
def test_two_rounds_follow_the_equations(
    method: Method, eta: float, beta1: float, beta2: float, tau: float
) -> None:
    task = Task(linear_backbone(W), method.adapt)
    x, m, v = W.astype(np.float64), np.zeros((2, 2)), np.full((2, 2), tau**2)
    server = method.init_server(task, 2, torch.tensor(0))
    for _ in range(2):
        delta = mean_change(x)
        m = beta1 * m + (1 - beta1) * delta
        if method.name == "fedadagrad":
            v = v + delta**2
        elif method.name == "fedadam":
            v = beta2 * v + (1 - beta2) * delta**2
        else:
            v = v - (1 - beta2) * delta**2 * np.sign(v - delta**2)
        x = x + eta * m / (np.sqrt(v) + tau)
        server, kept = one_round(method, task, server, [{}, {}])
        assert kept == [{}, {}]
    np.testing.assert_allclose(server["linear.weight"].numpy(), x, atol=1e-6)
    assert method.send(task, server, 0).keys() == task.state.keys()
    shown = method.global_state(task, server)
    assert shown is not None
    assert shown["linear.weight"] is server["linear.weight"]


@pytest.mark.slow
def test_with_a_large_tau_it_is_fedavg() -> None:
    """v stays at tau^2, so that a step is eta / (2 tau) times the mean change."""
    sgd = Optimiser("sgd", lr=0.05)
    ours, _ = last_round(FedAdagrad(tau=1e3, server_lr=2e3, optimiser=sgd))
    theirs, _ = last_round(FedAvg(optimiser=sgd))
    for name, value in theirs.server.items():
        torch.testing.assert_close(ours.server[name], value, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("method", [FedAdagrad(), FedAdam(), FedYogi()])
def test_running_statistics_are_averaged_plainly(method: Method) -> None:
    task = Task(digits_backbone(), method.adapt)
    server = method.init_server(task, 2, torch.tensor(0))
    uploads = stack([{name: value + 1 for name, value in task.state.items()}] * 2)
    cohort = Cohort((0, 1), SIZES, 1, torch.tensor(0))
    server = method.aggregate(task, server, uploads, cohort)
    assert server["norm.running_mean"].equal(task.state["norm.running_mean"] + 1)
    moved = server["norm.weight"] - task.state["norm.weight"]
    assert moved.min() > 0
    assert moved.max() < 0.1


def test_settings_out_of_range_are_refused() -> None:
    for method in ("fedadagrad", "fedadam", "fedyogi"):
        with pytest.raises(InputError, match=rf"methods\.{method}\.tau = 0.*greater than 0"):
            parse({"methods": {method: {"tau": 0}}})
    with pytest.raises(InputError, match=r"methods\.fedyogi\.beta2 = 1.*less than 1"):
        parse({"methods": {"fedyogi": {"beta2": 1}}})


@pytest.mark.parametrize("kind", [FedAdagrad, FedAdam, FedYogi])
def test_what_is_trained_has_moments(kind: type[Method]) -> None:
    for chosen, names in (
        ({"trainable": "head"}, {"head.weight", "head.bias"}),
        ({"layers": ("head", "norm")}, {"head.weight", "head.bias", "norm.weight", "norm.bias"}),
    ):
        method = kind(**chosen)
        task = Task(digits_backbone(), method.adapt)
        server = method.init_server(task, 2, torch.tensor(0))
        assert task.trained == names == strip_prefix(server, "server.m.").keys()
        assert names == strip_prefix(server, "server.v.").keys()
    method = kind(trainable="lora", rank=2, lora_alpha=8.0)
    task = Task(digits_backbone(), method.adapt)
    B = "hidden.lora_B.default.weight"
    A, scaled = method.lora(task, {**task.state, B: task.state[B] + 1})["hidden"]
    assert len(A) == 2
    assert scaled.max() == 4.0
