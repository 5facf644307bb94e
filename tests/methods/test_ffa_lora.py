"""FFA-LoRA by hand: a LoRA layer whose A stays, two clients, three steps each."""

import numpy as np
import pytest
import torch

from fedtailor.data.config import LocalConfig
from fedtailor.engine.client import client_round
from fedtailor.engine.costs import wire_bytes
from fedtailor.errors import InputError
from fedtailor.method import Cohort, Method
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.ffa_lora import FFALoRA
from fedtailor.optim import ClientContext, Optimiser
from fedtailor.params import stack
from fedtailor.random import key
from fedtailor.runs.experiment import parse
from fedtailor.task.task import Task
from tests.golden import SIZES, X, Y, linear_backbone, logit_gradient, one_round
from tests.small import digits_backbone, digits_federation, last_round

W0 = np.array([[0.1, -0.2], [0.3, 0.4]], dtype=np.float32)
A_NAME, B_NAME = (f"linear.lora_{f}.default.weight" for f in "AB")
SGD = Optimiser("sgd", lr=0.05)


def test_one_round_trains_b_alone() -> None:
    eta, alpha = 0.5, 3.0
    method = FFALoRA(rank=1, lora_alpha=alpha, optimiser=Optimiser("sgd", lr=eta))
    task = Task(linear_backbone(W0), method.adapt)
    assert set(task.state) == {B_NAME}
    A = task.model.get_parameter(A_NAME).double().numpy()
    expected = np.zeros((2, 1))
    for share, x, y in zip((0.25, 0.75), X, Y, strict=True):
        B = np.zeros((2, 1))
        for _ in range(3):
            G = logit_gradient(x @ (W0 + alpha * B @ A).T, y).T @ x
            B = B - eta * alpha * G @ A.T
        expected += share * B
    server, kept = one_round(method, task, task.state, [{}, {}])
    assert kept == [{}, {}]
    np.testing.assert_allclose(server[B_NAME].numpy(), expected, atol=1e-6)
    down, up = method.lora(task, server)["linear"]
    np.testing.assert_allclose(up @ down, alpha * expected @ A, atol=1e-6)


def products(method: Method) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean of the clients' B A, and B A of the means, after a round of two clients."""
    task = Task(digits_backbone(), method.adapt)
    federation = digits_federation()
    uploads, updates = [], []
    for client in (0, 2):
        batches = list(federation.batches(client, 1, LocalConfig(batch_size=8, epochs=2)))
        upload, _, _ = client_round(
            method, task, task.state, {}, batches, ClientContext(key(client))
        )
        uploads.append(upload)
        A, B = method.lora(task, upload)["hidden"]
        updates.append(B.double() @ A.double())
    cohort = Cohort((0, 2), SIZES, 1, key(9))
    A, B = method.lora(task, method.aggregate(task, task.state, stack(uploads), cohort))["hidden"]
    return 0.25 * updates[0] + 0.75 * updates[1], B.double() @ A.double()


def test_the_mean_of_the_products_is_the_product_of_the_means() -> None:
    mean, product = products(FFALoRA(rank=4, optimiser=SGD))
    assert mean.abs().max() > 1e-3
    torch.testing.assert_close(mean, product, atol=1e-7, rtol=1e-6)
    mean, product = products(FedAvg(trainable="lora", rank=4, optimiser=SGD))
    assert (mean - product).abs().max() > 1e-5


@pytest.mark.slow
def test_a_never_moves_and_is_never_sent() -> None:
    method = FFALoRA(rank=4, optimiser=SGD)
    start, _ = last_round(method, rounds=1)
    task = Task(digits_backbone(), method.adapt)
    end, store = last_round(method, rounds=3)
    other = Task(digits_backbone(), method.adapt)
    name = A_NAME.replace("linear", "hidden")
    assert not store.has_states
    assert all(".lora_A." not in key for key in end.server)
    assert end.server.keys() == task.state.keys()
    (A, B), (A_end, B_end) = (
        method.lora(t, r.server)["hidden"] for t, r in ((task, start), (other, end))
    )
    assert A.equal(A_end)
    assert A.equal(task.model.get_parameter(name))
    assert A.any()
    assert not B.equal(B_end)
    fedit = Task(digits_backbone(), FedAvg(trainable="lora", rank=4).adapt)
    spared = wire_bytes(fedit.state)["float32"] - wire_bytes(task.state)["float32"]
    assert spared == 4 * A.numel()


def test_rank_and_alpha_reach_the_layer() -> None:
    method = FFALoRA(rank=3, lora_alpha=6.0)
    task = Task(digits_backbone(), method.adapt)
    name = B_NAME.replace("linear", "hidden")
    assert task.state[name].shape == (16, 3)
    _, B = method.lora(task, {**task.state, name: torch.ones(16, 3)})["hidden"]
    assert B.equal(torch.full((16, 3), 2.0))


def test_a_rank_of_zero_is_refused() -> None:
    with pytest.raises(InputError, match=r"methods\.ffa-lora\.rank = 0.*greater than 0"):
        parse({"methods": {"ffa-lora": {"rank": 0}}})
