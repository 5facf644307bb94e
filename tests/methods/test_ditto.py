"""Ditto by hand: softmax regression, two clients, three steps of w and six of v, in NumPy."""

import numpy as np
import pytest
import torch

from fedtailor.data.config import LocalConfig
from fedtailor.errors import InputError
from fedtailor.methods.ditto import Ditto
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.local import Local
from fedtailor.optim import ClientContext, Optimiser
from fedtailor.params import add_prefix, strip_prefix
from fedtailor.random import key
from fedtailor.runs.experiment import parse
from fedtailor.task.task import Task
from tests.golden import X, Y, batch_of, linear_backbone, one_round, softmax_gradient
from tests.small import digits_backbone, digits_federation, last_round, same_bits

W = np.array([[0.1, -0.2], [0.3, 0.4]], dtype=np.float32)
V = [2 * W, -2 * W[::-1].copy()]  # of the two clients, from earlier rounds
MOMENTUM = Optimiser("sgd", lr=0.05, momentum=0.9)


def test_one_round_follows_the_equations() -> None:
    eta, eta_v, lam = 0.5, 0.2, 0.8
    method = Ditto(lam=lam, optimiser=Optimiser("sgd", lr=eta), private_passes=2, lr_private=eta_v)
    task = Task(linear_backbone(W), method.adapt)
    w_new, vs = np.zeros(W.shape), []
    for share, x, y, start in zip([0.25, 0.75], X, Y, V, strict=True):
        w, v = W.astype(np.float64), start.astype(np.float64)
        for _ in range(3):
            w = w - eta * softmax_gradient(w, x, y)
        for _ in range(2 * 3):
            v = v - eta_v * (softmax_gradient(v, x, y) + lam * (v - W))
        w_new += share * w
        vs.append(v)
    private = [{"own.linear.weight": torch.tensor(v)} for v in V]
    server, kept = one_round(method, task, task.state, private)
    np.testing.assert_allclose(server["linear.weight"].numpy(), w_new, atol=1e-6)
    for client, v in enumerate(vs):
        np.testing.assert_allclose(kept[client]["own.linear.weight"].numpy(), v, atol=1e-6)
        logits = method.predict(task, {**server, **kept[client]}, batch_of(client))
        np.testing.assert_allclose(logits.numpy(), X[client] @ v.T, atol=1e-5)


@pytest.mark.slow
def test_the_shared_half_is_fedavg() -> None:
    ours, _ = last_round(Ditto(lam=0.3, optimiser=MOMENTUM))
    theirs, _ = last_round(FedAvg(optimiser=MOMENTUM))
    assert same_bits(ours.server, theirs.server)


def test_without_the_term_the_private_half_is_local() -> None:
    method, alone = Ditto(lam=0.0, optimiser=MOMENTUM), Local(optimiser=MOMENTUM)
    task = Task(digits_backbone(), method.adapt)
    batches = list(digits_federation().batches(0, 1, LocalConfig(batch_size=8)))
    state = {**task.state, **method.init_client(task, 0, key(0))}
    ours, loss = method.local(task, state, batches, ClientContext(key(1)))
    theirs, other = alone.local(task, task.state, batches, ClientContext(key(1)).subkey(1))
    assert same_bits(strip_prefix(ours, "own."), theirs)
    assert loss.equal(other)


def test_a_large_lambda_keeps_the_private_model_at_the_received_one() -> None:
    method = Ditto(lam=1e3, lr_private=1e-3, optimiser=Optimiser(lr=0.1))
    task = Task(digits_backbone(), method.adapt)
    batches = list(digits_federation().batches(0, 1, LocalConfig(batch_size=8)))
    far = {name: value + 0.1 for name, value in task.state.items()}
    state, _ = method.local(
        task, {**task.state, **add_prefix(far, "own.")}, batches, ClientContext(key(1))
    )
    v = strip_prefix(state, "own.")
    assert all((v[n] - task.state[n]).abs().max() < 1e-2 for n in task.trained)
    assert any((state[n] - task.state[n]).abs().max() > 1e-2 for n in task.trained)


def test_the_distance_is_that_of_the_private_model_from_the_shared_one() -> None:
    method = Ditto()
    task = Task(digits_backbone(), method.adapt)
    far = {name: value + 0.5 for name, value in task.state.items()}
    shown = method.client_diagnostics(task, {**task.state, **add_prefix(far, "own.")}, {})
    numbers = sum(task.state[name].numel() for name in task.trained)
    assert float(shown["distance"]) == pytest.approx(0.5 * numbers**0.5, rel=1e-5)


def test_clients_that_have_not_taken_part_hold_the_start_and_strangers_get_w() -> None:
    method = Ditto(trainable="lora", rank=2)
    task = Task(digits_backbone(), method.adapt)
    server, private = method.init_server(task, 5, key(0)), method.init_client(task, 3, key(0))
    assert same_bits(method.inference_params(task, {**server, **private}), task.state)
    assert method.global_state(task, server) == server == method.inference_params(task, server)
    assert list(method.lora(task, task.state)) == ["hidden"]


def test_a_negative_lambda_is_refused() -> None:
    with pytest.raises(InputError, match=r"methods\.ditto\.lam = -1.*greater than or equal to 0"):
        parse({"methods": {"ditto": {"lam": -1}}})
