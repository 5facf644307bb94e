"""IFCA by hand: two models, clients that choose by their loss, averages by cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedtailor.engine.client import client_round
from fedtailor.engine.config import EngineConfig
from fedtailor.errors import InputError
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.ifca import IFCA
from fedtailor.optim import ClientContext, Optimiser
from fedtailor.params import Params
from fedtailor.random import key
from fedtailor.task.task import Task
from tests.golden import X, Y, batch_of, linear_backbone, one_round, softmax, softmax_gradient
from tests.small import SIZES, check_all, digits_backbone, last_round

ETA = 0.5
BANK = np.array(
    [[[0.1, -0.2], [0.3, 0.4]], [[-0.6, 0.9], [0.5, -0.7]], [[3.0, -3.0], [-3.0, 3.0]]]
).astype(np.float32)
FRESH = {"own.choice": torch.tensor(0)}


def loss(w: NDArray[Any], client: int) -> float:
    p = softmax((X[client] @ w.T).astype(np.float64))
    return float(-np.log(p[np.arange(len(Y[client])), Y[client]]).mean())


def linear(**fields: Any) -> tuple[IFCA, Task, Params]:
    method = IFCA(clusters=3, optimiser=Optimiser("sgd", lr=ETA), **fields)
    server = {"bank.linear.weight": torch.tensor(BANK)}
    return method, Task(linear_backbone(BANK[0]), method.adapt), server


def trained(client: int, choice: int, batches: int) -> NDArray[np.float64]:
    w = BANK[choice].astype(np.float64)
    for _ in range(batches):
        w = w - ETA * softmax_gradient(w, X[client], Y[client])
    return w


def test_one_round_of_model_averaging() -> None:
    method, task, server = linear()
    chosen = [int(np.argmin([loss(w, client) for w in BANK])) for client in (0, 1)]
    assert chosen == [1, 0]
    new, kept = one_round(method, task, server, [FRESH, FRESH])
    got = new["bank.linear.weight"].numpy()
    for client, choice in enumerate(chosen):
        assert kept[client]["own.choice"] == choice
        np.testing.assert_allclose(got[choice], trained(client, choice, 3), atol=1e-6)
    assert (got[2] == BANK[2]).all()  # nobody chose it


def test_a_cluster_of_several_weighs_them_by_their_examples() -> None:
    method, task, server = linear()
    server["bank.linear.weight"] = torch.tensor(np.stack([BANK[2], BANK[0], BANK[2]]))
    new, kept = one_round(method, task, server, [FRESH, FRESH])
    assert [own["own.choice"].item() for own in kept] == [1, 1]
    expected = 0.25 * trained(0, 0, 3) + 0.75 * trained(1, 0, 3)
    np.testing.assert_allclose(new["bank.linear.weight"][1], expected, atol=1e-6)


def test_one_round_of_gradient_averaging() -> None:
    method, task, server = linear(averaging="gradients")
    new, _ = one_round(method, task, server, [FRESH, FRESH], steps=1)
    expected = BANK.astype(np.float64)
    for client, (choice, share) in enumerate([(1, 0.25), (0, 0.75)]):
        gradient = softmax_gradient(expected[choice], X[client], Y[client])
        expected[choice] = expected[choice] - ETA * share * gradient
    np.testing.assert_allclose(new["bank.linear.weight"], expected, atol=1e-6)


LORA: dict[str, Any] = {"trainable": "lora", "rank": 2, "lora_alpha": 3.0}


@pytest.mark.parametrize(
    ("averaging", "fields"),
    [("models", {}), ("gradients", {"layers": ("h*", "norm")}), ("models", LORA)],
)
def test_one_cluster_is_fedavg(averaging: Any, fields: dict[str, Any]) -> None:
    ours = last_round(IFCA(clusters=1, averaging=averaging, **fields), (9, 3))[0].server
    theirs = last_round(FedAvg(**fields), (9, 3))[0].server
    assert ours.keys() == {f"bank.{name}" for name in theirs}
    for name, value in theirs.items():
        torch.testing.assert_close(ours[f"bank.{name}"][0], value, rtol=2e-6, atol=2e-7)


def test_padding_has_no_say_in_the_choice() -> None:
    method, task, server = linear()
    batch = batch_of(1)
    wrong = {"x": 50 * torch.tensor([[1.0, -1.0]]), "labels": torch.tensor([1])}
    padded = {name: torch.cat([batch[name], wrong[name]]) for name in batch}
    padded["weight"] = torch.tensor([1.0, 1.0, 1.0, 0.0])
    results = [
        client_round(method, task, server, FRESH, batches, ClientContext(key(0)))
        for batches in ([batch], [padded], [{**padded, "weight": torch.ones(4)}])
    ]
    choices = [kept["own.choice"].item() for _, kept, _ in results]
    assert choices[:2] == [0, 0]
    assert choices[2] != 0


def test_a_client_uses_the_model_that_it_chose() -> None:
    method, task, server = linear()
    x = batch_of(1)
    for choice in range(3):
        state = {**server, "own.choice": torch.tensor(choice)}
        logits = method.predict(task, state, x)
        np.testing.assert_allclose(logits, X[1] @ BANK[choice].T, rtol=1e-5)
        assert method.client_diagnostics(task, state, x)["cluster"] == choice


def test_equal_models_are_chosen_from_by_lot() -> None:
    method, task, server = linear()
    server["bank.linear.weight"] = torch.tensor(BANK[:1]).expand(3, -1, -1).contiguous()
    server["bank.linear.weight"][2] *= -1.0  # worse for client 1
    seen = {
        client_round(method, task, server, FRESH, [batch_of(1)], ClientContext(key(n)))[1][
            "own.choice"
        ].item()
        for n in range(20)
    }
    assert seen == {0, 1}


@pytest.mark.slow
def test_clients_choose_for_themselves_when_run_together() -> None:
    method = IFCA(clusters=3, jitter=0.5)
    together = EngineConfig("vectorised", clients_per_step=5)
    (one, store), (other, other_store) = (
        last_round(method, engine=engine) for engine in (EngineConfig(), together)
    )
    choices = [store.read(k)["own.choice"].item() for k in range(len(SIZES))]
    assert len(set(choices)) > 1
    assert choices == [other_store.read(k)["own.choice"].item() for k in range(len(SIZES))]
    for name, value in one.server.items():
        torch.testing.assert_close(value, other.server[name], atol=2e-5, rtol=0)


def test_models_start_apart() -> None:
    for pretrained, jitter, least in ((False, 0.1, 0.9), (True, 0.1, 0.05), (True, 0.4, 0.2)):
        method = IFCA(clusters=3, jitter=jitter)
        task = Task(replace(digits_backbone(), pretrained=pretrained), method.adapt)
        server = method.init_server(task, 5, key(0))
        own = server["bank.hidden.weight"]
        assert own[0].equal(task.state["hidden.weight"])
        gaps = (own[1:] - own[0]).square().mean((1, 2)).sqrt()
        relative = gaps / own[0].square().mean().sqrt()
        assert (relative > least).all()
        if pretrained:
            assert (relative < 3 * least).all()


def test_the_portable_model_is_the_chosen_one_with_its_head() -> None:
    method = IFCA(clusters=2, trainable="lora", rank=1, lora_alpha=3.0)
    task = Task(digits_backbone(), method.adapt)
    server = {n: torch.randn_like(v) for n, v in method.init_server(task, 5, key(0)).items()}
    state = {**server, "own.choice": torch.tensor(1)}
    portable = method.portable(task, state)
    A, B = portable.lora["hidden"]
    plain = Task(digits_backbone())
    weight = plain.state["hidden.weight"] + B @ A
    alone = {**plain.state, **portable.tensors, "hidden.weight": weight}
    batch = {"pixel_values": torch.rand(3, 1, 8, 8)}
    logits = plain.logits(alone, batch)
    torch.testing.assert_close(method.predict(task, state, batch), logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (IFCA(clusters=6), "clusters = 6; allowed: 1 to the 5 clients"),
        (IFCA(jitter=0), "jitter = 0 makes 2 equal copies"),
        (IFCA(jitter=0, trainable="lora"), "jitter = 0 makes 2 equal copies"),
    ],
)
def test_bad_fields_are_refused(method: IFCA, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_all(method, Task(digits_backbone(), method.adapt), 5, 5, 3)


def test_good_fields_are_not() -> None:
    for method, pretrained in (
        (IFCA(clusters=5), True),
        (IFCA(clusters=1, jitter=0), True),
        (IFCA(clusters=2, jitter=0), False),
    ):
        backbone = replace(digits_backbone(), pretrained=pretrained)
        check_all(method, Task(backbone, method.adapt), 5, 5, 3)
