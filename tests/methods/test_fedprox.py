"""FedProx by hand: softmax regression, two clients, three steps each, in NumPy."""

import numpy as np
import pytest

from fedtailor.errors import InputError
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedprox import FedProx
from fedtailor.optim import Optimiser
from fedtailor.runs.experiment import parse
from fedtailor.task.task import Task
from tests.golden import X, Y, linear_backbone, one_round, softmax_gradient
from tests.small import digits_backbone, last_round, same_bits

W = np.array([[0.1, -0.2], [0.3, 0.4]], dtype=np.float32)


def test_one_round_follows_equation_2() -> None:
    eta, mu = 0.5, 0.8
    method = FedProx(mu=mu, optimiser=Optimiser("sgd", lr=eta))
    task = Task(linear_backbone(W), method.adapt)
    expected = np.zeros_like(W, dtype=np.float64)
    for share, x, y in zip([0.25, 0.75], X, Y, strict=True):
        w = W.astype(np.float64)
        for _ in range(3):
            w = w - eta * (softmax_gradient(w, x, y) + mu * (w - W))
        expected += share * w
    server, kept = one_round(method, task, task.state, [{}, {}])
    assert kept == [{}, {}]
    np.testing.assert_allclose(server["linear.weight"].numpy(), expected, atol=1e-6)


@pytest.mark.slow
def test_without_the_term_it_is_fedavg() -> None:
    sgd = Optimiser("sgd", lr=0.05, momentum=0.9)
    ours, _ = last_round(FedProx(mu=0.0, optimiser=sgd, layers=("h*", "norm")))
    theirs, _ = last_round(FedAvg(optimiser=sgd, layers=("h*", "norm")))
    assert same_bits(ours.server, theirs.server)


@pytest.mark.slow
def test_a_larger_mu_stays_nearer() -> None:
    start = Task(digits_backbone()).state

    def drift(mu: float) -> float:
        server = last_round(FedProx(mu=mu, optimiser=Optimiser(lr=0.05)))[0].server
        return sum((server[n] - start[n]).square().sum().item() for n in ("conv.weight",))

    assert drift(10.0) < 0.5 * drift(0.0)


def test_a_negative_mu_is_refused() -> None:
    with pytest.raises(InputError, match=r"methods\.fedprox\.mu = -1.*greater than or equal to 0"):
        parse({"methods": {"fedprox": {"mu": -1}}})
