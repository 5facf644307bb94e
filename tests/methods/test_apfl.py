"""APFL by hand: softmax regression, two clients, three steps each, in NumPy."""

import numpy as np
import pytest
import torch

from fedtailor.data.config import LocalConfig
from fedtailor.errors import InputError
from fedtailor.methods.apfl import APFL
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.local import Local
from fedtailor.optim import ClientContext, Optimiser
from fedtailor.params import Params, add_prefix, strip_prefix
from fedtailor.random import key
from fedtailor.runs.experiment import parse
from fedtailor.task.task import Task
from tests.golden import X, Y, batch_of, linear_backbone, one_round, softmax_gradient
from tests.small import digits_backbone, digits_federation, last_round, same_bits

W = np.array([[0.1, -0.2], [0.3, 0.4]], dtype=np.float32)
V = [2 * W, -2 * W[::-1].copy()]  # of the two clients, from earlier rounds
MOMENTUM = Optimiser("sgd", lr=0.05, momentum=0.9)


@pytest.mark.parametrize("adaptive", [True, False])
def test_one_round_follows_the_equations(adaptive: bool) -> None:
    eta, eta_mix, start = 0.5, 0.2, 0.3
    method = APFL(mix=start, adaptive=adaptive, optimiser=Optimiser(lr=eta), lr_mix=eta_mix)
    task = Task(linear_backbone(W), method.adapt)
    w_new, found = np.zeros(W.shape), []
    for share, x, y, v in zip([0.25, 0.75], X, Y, V, strict=True):
        w, v, a = W.astype(np.float64), v.astype(np.float64), start
        if adaptive:
            a -= eta_mix * ((v - w) * softmax_gradient(a * v + (1 - a) * w, x, y)).sum()
            assert 0 < a < 1
            assert abs(a - start) > 0.01
        for _ in range(3):
            u = a * v + (1 - a) * w
            w = w - eta * softmax_gradient(w, x, y)
            v = v - eta * a * softmax_gradient(u, x, y)
        w_new += share * w
        found.append((v, a))
    private = [{"own.linear.weight": torch.tensor(v), "mix": torch.tensor(start)} for v in V]
    server, kept = one_round(method, task, task.state, private)
    np.testing.assert_allclose(server["linear.weight"].numpy(), w_new, atol=1e-6)
    for client, (v, a) in enumerate(found):
        np.testing.assert_allclose(kept[client]["own.linear.weight"].numpy(), v, atol=1e-6)
        assert kept[client]["mix"].item() == pytest.approx(a, abs=1e-6)
        state = {**server, **kept[client]}
        logits = method.predict(task, state, batch_of(client))
        np.testing.assert_allclose(
            logits.numpy(), X[client] @ (a * v + (1 - a) * w_new).T, atol=1e-5
        )
        assert method.client_diagnostics(task, state, batch_of(client))["mix"].equal(state["mix"])


@pytest.mark.slow
def test_a_weight_of_0_is_fedavg_and_of_1_local() -> None:
    none, store = last_round(APFL(mix=0.0, adaptive=False, optimiser=MOMENTUM))
    fedavg, _ = last_round(FedAvg(optimiser=MOMENTUM))
    assert same_bits(none.server, fedavg.server)
    task = Task(digits_backbone())
    personal = APFL().inference_params(task, {**none.server, **store.read(0)})
    assert same_bits(personal, fedavg.server)

    everything, ours = last_round(APFL(mix=1.0, adaptive=False, optimiser=MOMENTUM))
    alone, theirs = last_round(Local(optimiser=MOMENTUM))
    assert same_bits(everything.server, fedavg.server)
    assert everything.losses == alone.losses
    for client in range(5):
        personal = APFL().inference_params(task, {**everything.server, **ours.read(client)})
        assert same_bits(personal, theirs.read(client))


def adapted(**settings: float) -> float:
    """The weight after a step of a client whose v is far from w."""
    method = APFL(**settings)  # type: ignore[arg-type]
    task = Task(digits_backbone(), method.adapt)
    batches = list(digits_federation().batches(0, 1, LocalConfig(batch_size=8)))[:1]
    v = {name: 2 * value for name, value in task.state.items()}
    state: Params = {**task.state, **add_prefix(v, "own."), "mix": torch.tensor(0.5)}
    return method.local(task, state, batches, ClientContext(key(1), lr_scale=0.5))[0]["mix"].item()


def test_the_weight_stays_a_weight_and_takes_its_own_rate() -> None:
    assert adapted(lr_mix=1e4) in (0.0, 1.0)
    small, by_default = adapted(lr_mix=0.01) - 0.5, adapted() - 0.5
    assert small != 0
    assert small == by_default
    assert adapted(lr_mix=0.02) - 0.5 == pytest.approx(2 * small, rel=1e-3)


def test_the_portable_model_is_the_mixture() -> None:
    method = APFL(trainable="lora", rank=2, lora_alpha=4.0)
    task = Task(digits_backbone(), method.adapt)
    server = method.init_server(task, 5, key(0))
    private = {n: v + 1 for n, v in method.init_client(task, 0, key(0)).items()}
    state = {**server, **private, "mix": torch.tensor(0.25)}
    assert method.global_state(task, server) == server == method.inference_params(task, server)
    used = method.inference_params(task, state)
    for name, value in task.state.items():
        torch.testing.assert_close(used[name], value + 0.25)
    assert same_bits(strip_prefix(method.init_client(task, 1, key(0)), "own."), task.state)
    portable = method.portable(task, state)
    assert portable.tensors["head.bias"].equal(used["head.bias"])
    _, B = portable.lora["hidden"]
    torch.testing.assert_close(B, torch.full_like(B, 4.0 / 2 * 0.25))


def test_a_weight_beyond_1_is_refused() -> None:
    with pytest.raises(InputError, match=r"methods\.apfl\.mix = 1\.5.*less than or equal to 1"):
        parse({"methods": {"apfl": {"mix": 1.5}}})
