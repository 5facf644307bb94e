"""Clients that join after the training, of methods whose server has a row for each client; the
first step of their weights by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedtailor.methods.fedalt import FedALT
from fedtailor.methods.fedhft import FedHFT
from fedtailor.methods.fedmerge import FedMerge
from fedtailor.methods.hetlora import HetLoRA
from fedtailor.optim import ClientContext, Optimiser
from fedtailor.params import Batch
from fedtailor.random import key
from fedtailor.task.task import Task
from tests.golden import X, Y, linear_backbone, softmax, softmax_gradient
from tests.small import same_bits

F64 = NDArray[np.float64]
W0 = np.array([[0.1, -0.2], [0.3, 0.4]], dtype=np.float32)
CONTEXT = ClientContext(key(0))
BATCH: Batch = {"x": torch.tensor(X[1]).float(), "labels": torch.tensor(Y[1])}


def stepped(w: F64, gradient: F64) -> F64:
    """Weights ``w`` after Adam's first step of 0.5 on their logits; ``gradient`` is theirs."""
    g = w * (gradient - w @ gradient)
    return softmax(np.log(w) - 0.5 * g / (np.abs(g) + 1e-8))


def loss(task: Task, state: dict[str, torch.Tensor]) -> float:
    return task.loss(state, BATCH, key(0))[0].item()


def test_fedmerge_finds_the_weights_of_its_merge() -> None:
    method = FedMerge(models=2)
    task = Task(linear_backbone(W0), method.adapt)
    Theta = np.stack([W0, -2 * W0]).astype(np.float64)
    server = {
        "bank.linear.weight": torch.tensor(Theta).float(),
        "logits": torch.tensor([[0.0, 3.0], [0.0, 0.0], [0.0, 1.0]]).double(),  # two have trained
    }
    received = method.send_new(task, server, 9)
    assert list(received) == ["bank.linear.weight", "mean_weights"]
    guess = method.fit_row(task, received, [], CONTEXT)
    mean = np.mean([softmax(np.array([0.0, last])) for last in (3.0, 1.0)], 0)
    start = np.tensordot(mean, Theta, 1)
    np.testing.assert_allclose(guess["linear.weight"].numpy(), start, atol=1e-6)
    slope = softmax_gradient(start, X[1], Y[1])
    w = stepped(mean, np.array([(theta * slope).sum() for theta in Theta]))
    one = method.fit_row(task, received, [BATCH], CONTEXT)
    np.testing.assert_allclose(one["linear.weight"].numpy(), np.tensordot(w, Theta, 1), atol=1e-5)
    many = method.fit_row(task, received, [BATCH] * 20, CONTEXT)
    assert loss(task, many) < min(loss(task, one), loss(task, guess))


def test_a_new_client_of_fedmerge_selects_its_own_models() -> None:
    """Also those that no other client merges."""
    method = FedMerge(models=6, selected=2)
    task = Task(linear_backbone(W0), method.adapt)
    bank = torch.arange(6.0)[:, None, None] * torch.ones(6, 2, 2)
    server = {"bank.linear.weight": bank, "logits": torch.full((2, 6), -1e9).double()}
    server["logits"][:, :2] = torch.tensor([[0.5, -0.5], [0.1, 0.2]]).double()
    received = method.send_new(task, server, 2)
    assert torch.allclose(received["mean_weights"][2:], torch.zeros(4).double())
    for number in range(6):
        context = ClientContext(key(number))
        (a,) = method._first_logits(1, context.key)
        low, high = a.isclose(torch.zeros(6).double()).nonzero().flatten().tolist()
        merged = method.fit_row(task, received, [], context)["linear.weight"]
        assert low - 1e-5 <= merged[0, 0] <= high + 1e-5


def test_fedmerges_fixed_weights_are_drawn_anew() -> None:
    method = FedMerge(models=3, weights="fixed", selected=1)
    task = Task(linear_backbone(W0), method.adapt)
    bank = torch.arange(3.0)[:, None, None] * torch.ones(3, 2, 2)
    row = method.fit_row(task, {"bank.linear.weight": bank}, [BATCH], CONTEXT)["linear.weight"]
    assert row.unique().tolist()[0] in (0.0, 1.0, 2.0)
    assert len(row.unique()) == 1


def test_fedhft_finds_its_assignments() -> None:
    method = FedHFT(clusters=2, rank=1, lora_alpha=1.0)
    task = Task(linear_backbone(W0), method.adapt)
    B = np.array([[[1.0], [-1.0]], [[-3.0], [4.0]]])  # [C, d_out, r]
    server = method.init_server(task, 3, key(0))
    server["linear.B"] = torch.tensor(B).float()
    A = server["linear.A"].double().numpy()
    received = method.send_new(task, server, 3)
    assert received.keys() == {"start", "linear.A", "linear.B"}
    guess = method.fit_row(task, received, [], CONTEXT)
    assert same_bits(guess, method.send(task, server, 0))  # nobody has been clustered yet
    slope = softmax_gradient(W0 + (B @ A).mean(0), X[1], Y[1])
    p = stepped(np.full(2, 0.5), np.array([(update * slope).sum() for update in B @ A]))
    one = method.fit_row(task, received, [BATCH], CONTEXT)
    mixture = (one["linear.B_mix"] @ one["linear.A_mix"]).numpy()
    np.testing.assert_allclose(mixture, np.tensordot(p, B @ A, 1), atol=1e-5)
    many = method.fit_row(task, received, [BATCH] * 20, CONTEXT)
    assert loss(task, many) < min(loss(task, one), loss(task, guess))


def test_fedalt_trains_the_individual_lora_from_the_mean() -> None:
    method = FedALT(rank=1, lora_alpha=1.0, optimiser=Optimiser("sgd", lr=0.5))
    task = Task(linear_backbone(W0), method.adapt)
    server = method.init_server(task, 2, key(0))
    A, B = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.5], [-0.5]])
    server |= {"sum.linear.individual_A": 2 * A.double(), "sum.linear.individual_B": 2 * B.double()}
    server["seen"] = torch.ones(2).double()
    received = method.send_new(task, server, 2)
    for name in ("individual", "rest"):
        assert received[f"linear.{name}_A"].equal(A)
        assert received[f"linear.{name}_B"].equal(B)
    assert method.fit_row(task, received, [], CONTEXT) is received
    fitted = method.fit_row(task, received, [BATCH] * 5, CONTEXT)
    assert fitted.keys() == received.keys()
    assert fitted["linear.rest_B"].equal(B)
    assert not fitted["linear.individual_B"].equal(B)
    assert loss(task, fitted) < loss(task, received)


@pytest.mark.parametrize(("client", "rank"), [(4, 1), (5, 2)])
def test_hetloras_ranks_go_on_in_turn(client: int, rank: int) -> None:
    method = HetLoRA(rank=(1, 2))
    task = Task(linear_backbone(W0), method.adapt)
    server = method.init_server(task, 3, key(0))
    sent = method.send_new(task, server, client)
    assert {len(v) for name, v in sent.items() if ".lora_A." in name} == {rank}
