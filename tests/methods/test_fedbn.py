"""FedBN by hand: a batch normalisation and softmax regression, two clients, in NumPy."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedtailor.engine.config import CohortConfig, Plan
from fedtailor.engine.rounds import rounds
from fedtailor.errors import InputError
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedbn import FedBN
from fedtailor.optim import Optimiser
from fedtailor.random import key
from fedtailor.task.backbone import Backbone
from fedtailor.task.task import Task
from tests.golden import Linear, X, Y, logit_gradient, one_round
from tests.small import digits_backbone, digits_federation, last_round, same_bits

W = np.array([[0.1, -0.2], [0.3, 0.4]], dtype=np.float32)
ETA = 0.5


class Normed(Linear):
    """Logits W BatchNorm(x)."""

    def __init__(self) -> None:
        super().__init__(W)
        self.bn = nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.bn(x))


def train_by_hand(
    w: NDArray[np.float64], own: dict[str, NDArray[np.float64]], client: int
) -> tuple[NDArray[np.float64], dict[str, NDArray[np.float64]]]:
    """Three steps on all of a client's examples: W and the normalisation afterwards."""
    x, y = X[client], Y[client]
    scale, shift, mean, var = (own[n] for n in ("weight", "bias", "running_mean", "running_var"))
    h = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)
    for _ in range(3):
        dz = logit_gradient((h * scale + shift) @ w.T, y)
        dw, dh = dz.T @ (h * scale + shift), dz @ w
        w, scale, shift = w - ETA * dw, scale - ETA * (dh * h).sum(0), shift - ETA * dh.sum(0)
        mean = 0.9 * mean + 0.1 * x.mean(0)
        var = 0.9 * var + 0.1 * x.var(0) * len(x) / max(len(x) - 1, 1)
    return w, {"weight": scale, "bias": shift, "running_mean": mean, "running_var": var}


def test_two_rounds_follow_the_equations() -> None:
    method = FedBN(optimiser=Optimiser(lr=ETA))
    task = Task(Backbone(Normed()), method.adapt)
    server = method.init_server(task, 2, key(0))
    private = [method.init_client(task, client, key(client)) for client in (0, 1)]
    w = W.astype(np.float64)
    start = {"weight": 1.0, "bias": 0.0, "running_mean": 0.0, "running_var": 1.0}
    own = [{name: np.full(2, value) for name, value in start.items()}] * 2
    for _ in range(2):
        done = [train_by_hand(w, own[client], client) for client in (0, 1)]
        w, own = 0.25 * done[0][0] + 0.75 * done[1][0], [new for _, new in done]
        server, private = one_round(method, task, server, private)
    assert server.keys() == {"linear.weight"}
    np.testing.assert_allclose(server["linear.weight"].numpy(), w, atol=1e-5)
    for client in (0, 1):
        assert private[client].keys() == {f"bn.{name}" for name in start}
        for name, value in own[client].items():
            np.testing.assert_allclose(private[client][f"bn.{name}"].numpy(), value, atol=1e-5)
    assert method.global_state(task, server) is None


@pytest.mark.slow
def test_a_federation_of_one_and_a_first_round_are_fedavgs() -> None:
    ours, store = last_round(FedBN(), (20,), rounds=3)
    theirs, _ = last_round(FedAvg(), (20,), rounds=3)
    assert same_bits({**ours.server, **store.read(0)}, theirs.server)
    ours, store = last_round(FedBN(), rounds=1)
    theirs, _ = last_round(FedAvg(), rounds=1)
    assert same_bits(ours.server, {name: theirs.server[name] for name in ours.server})
    means = [store.read(client)["norm.running_mean"] for client in (0, 2)]
    assert not means[0].equal(means[1])


def test_a_client_that_never_took_part_has_the_models_own_normalisations() -> None:
    last, store = last_round(FedBN(), rounds=1, cohort=CohortConfig(size=1))
    start = Task(digits_backbone()).state
    for client in set(range(5)) - set(last.cohort.clients):
        assert all(value.equal(start[name]) for name, value in store.read(client).items())


def test_layers_restrict_what_is_trained_and_kept() -> None:
    last, store = last_round(FedBN(layers=("norm", "head")))
    assert last.server.keys() == {"head.weight", "head.bias"}
    assert "norm.running_var" in store.read(0)


def test_lora_goes_with_normalisations_in_the_head() -> None:
    method = FedBN(trainable="lora", rank=2, lora_alpha=8.0)
    task = Task(replace(digits_backbone(), head=("norm", "head")), method.adapt)
    method.check(task, 5, 5, 1)
    kept = method.init_client(task, 0, torch.tensor(0))
    assert {"norm.weight", "norm.bias"} <= kept.keys()
    shared = method.init_server(task, 5, torch.tensor(0))
    assert len(shared["hidden.lora_A.default.weight"]) == 2
    B = shared["hidden.lora_B.default.weight"]
    moved = {**task.state, "hidden.lora_B.default.weight": B + 1}
    assert method.lora(task, moved)["hidden"][1].max() == 4.0


@pytest.mark.parametrize(
    "method", [FedBN(trainable="lora", rank=2), FedBN(trainable="head"), FedBN(layers=("hidden",))]
)
def test_without_a_trained_normalisation_it_is_refused(method: FedBN) -> None:
    task = Task(digits_backbone(), method.adapt)
    with pytest.raises(
        InputError, match=rf"none is trained in model 'digits net'.*'{method.trainable}'.*allowed"
    ):
        next(rounds(method, task, digits_federation(), Plan(rounds=1)))
