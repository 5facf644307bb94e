"""FedEM by hand: responsibilities, mixture weights and weighted steps in NumPy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedtailor.engine.client import client_round
from fedtailor.errors import InputError
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedem import FedEM
from fedtailor.optim import ClientContext, Optimiser
from fedtailor.params import Params
from fedtailor.random import key
from fedtailor.task.task import Task
from tests.golden import X, Y, batch_of, linear_backbone, one_round, softmax
from tests.small import check_all, digits_backbone, last_round

ETA = 0.5
BANK = np.array(
    [[[0.1, -0.2], [0.3, 0.4]], [[-0.6, 0.9], [0.5, -0.7]], [[1.0, -1.0], [-1.0, 1.0]]]
).astype(np.float32)
PI = np.array([[0.2, 0.5, 0.3], [0.6, 0.3, 0.1]])
F64 = NDArray[np.float64]


def linear(M: int = 3) -> tuple[FedEM, Task, Params, list[Params]]:
    method = FedEM(components=M, optimiser=Optimiser("sgd", lr=ETA))
    server = {"bank.linear.weight": torch.tensor(BANK[:M])}
    private = [{"own.pi": torch.tensor(pi[:M] / pi[:M].sum()).float()} for pi in PI]
    return method, Task(linear_backbone(BANK[0]), method.adapt), server, private


def probabilities(client: int) -> F64:
    """p(y_i | x_i, theta_m), [n, M]."""
    rows = np.arange(len(Y[client]))
    w = BANK.astype(np.float64)
    return np.stack([softmax(X[client] @ theta.T)[rows, Y[client]] for theta in w], axis=1)


def test_one_round_follows_algorithm_1() -> None:
    method, task, server, private = linear()
    expected = np.zeros(BANK.shape)
    new, kept = one_round(method, task, server, private)
    for client, share in enumerate([0.25, 0.75]):
        q = PI[client] * probabilities(client)
        q = q / q.sum(1, keepdims=True)  # (9)
        np.testing.assert_allclose(kept[client]["own.pi"], q.mean(0), atol=1e-6)  # (10)
        x, y = X[client], Y[client]
        for m in range(3):
            w = BANK[m].astype(np.float64)
            for _ in range(3):
                error = q[:, m, None] * (softmax(x @ w.T) - np.eye(2)[y])
                w = w - ETA * error.T @ x / len(y)
            expected[m] += share * w
    np.testing.assert_allclose(new["bank.linear.weight"], expected, atol=1e-6)


def test_the_prediction_is_the_mixture_of_distributions() -> None:
    method, task, server, private = linear()
    for client in (0, 1):
        state = {**server, **private[client]}
        got = method.predict(task, state, batch_of(client)).exp()
        models = BANK.astype(np.float64)
        expected = sum(PI[client, m] * softmax(X[client] @ models[m].T) for m in range(len(models)))
        np.testing.assert_allclose(got, expected, atol=1e-6)
    without = {**server, "own.pi": torch.tensor([0.0, 1.0, 0.0])}
    got = method.predict(task, without, batch_of(1)).exp()
    np.testing.assert_allclose(got, softmax(X[1] @ BANK[1].T), atol=1e-6)


@pytest.mark.parametrize(
    "fields", [{}, {"layers": ("h*", "norm")}, {"trainable": "lora", "rank": 2, "lora_alpha": 3.0}]
)
def test_one_component_is_fedavg(fields: dict[str, Any]) -> None:
    ours = last_round(FedEM(components=1, **fields), (9, 3))[0]
    theirs = last_round(FedAvg(**fields), (9, 3))[0]
    assert ours.losses == pytest.approx(theirs.losses)
    assert ours.server.keys() == {f"bank.{name}" for name in theirs.server}
    for name, value in theirs.server.items():
        torch.testing.assert_close(ours.server[f"bank.{name}"][0], value, rtol=2e-6, atol=2e-7)
    for one, other in zip(ours.evaluations, theirs.evaluations, strict=False):
        assert one.loss == pytest.approx(other.loss, abs=1e-5)


def test_padding_has_no_part_in_the_mixture() -> None:
    method, task, server, private = linear()
    batch = batch_of(1)
    wrong = {"x": 50 * torch.tensor([[1.0, -1.0]]), "labels": torch.tensor([1])}
    padded = {name: torch.cat([batch[name], wrong[name]]) for name in batch}
    padded["weight"] = torch.tensor([1.0, 1.0, 1.0, 0.0])
    empty = {**padded, "weight": torch.zeros(4)}
    pis = [
        client_round(method, task, server, private[1], batches, ClientContext(key(0)))[1]["own.pi"]
        for batches in ([batch], [padded, empty], [{**padded, "weight": torch.ones(4)}])
    ]
    torch.testing.assert_close(pis[0], pis[1])
    assert not torch.allclose(pis[0], pis[2], atol=1e-2)


def test_components_drop_out_each_on_their_own() -> None:
    method = FedEM(components=2, jitter=0.0)
    task = Task(digits_backbone(dropout=0.5), method.adapt)
    server = method.init_server(task, 2, key(0))
    batch = {"pixel_values": torch.ones(4, 1, 8, 8), "labels": torch.arange(4)}
    private = method.init_client(task, 0, key(0))
    upload, _, _ = client_round(method, task, server, private, [batch], ClientContext(key(0)))
    assert not upload["bank.head.weight"][0].equal(upload["bank.head.weight"][1])


def test_components_start_apart_by_the_jitter() -> None:
    for jitter in (0.05, 0.4):
        method = FedEM(components=3, jitter=jitter)
        task = Task(digits_backbone(), method.adapt)
        own = method.init_server(task, 5, key(0))["bank.hidden.weight"]
        assert len(own) == 3
        assert own[0].equal(task.state["hidden.weight"])
        gaps = (own[1:] - own[0]).square().mean((1, 2)).sqrt() / own[0].square().mean().sqrt()
        assert gaps.tolist() == pytest.approx([jitter] * 2, rel=0.2)


def test_the_weights_are_observed_and_start_equal() -> None:
    method = FedEM(components=4)
    task = Task(digits_backbone(), method.adapt)
    state = method.init_client(task, 3, key(0))
    assert method.client_diagnostics(task, state, {})["weights"].tolist() == [0.25] * 4


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (FedEM(jitter=0), "jitter = 0 makes 3 equal copies"),
        (FedEM(jitter=0, trainable="lora"), "jitter = 0 makes 3 equal copies"),
    ],
)
def test_bad_fields_are_refused(method: FedEM, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_all(method, Task(digits_backbone(), method.adapt), 5, 5, 3)


def test_good_fields_are_not() -> None:
    new = replace(digits_backbone(), pretrained=False)
    for method, backbone in (
        (FedEM(), digits_backbone()),
        (FedEM(components=1, jitter=0), digits_backbone()),
        (FedEM(jitter=0), new),
    ):
        check_all(method, Task(backbone, method.adapt), 5, 5, 3)
