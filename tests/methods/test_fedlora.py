"""FedLoRA by hand: a LoRA layer, two clients, two steps each, and fine-tuning before use."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedtailor.errors import InputError
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedavg_ft import FedAvgFT
from fedtailor.methods.fedlora import FedLoRA
from fedtailor.optim import ClientContext, Optimiser
from fedtailor.params import Params
from fedtailor.random import key
from fedtailor.runs.experiment import parse
from fedtailor.task.task import Task
from tests.golden import X, Y, batch_of, linear_backbone, logit_gradient, one_round
from tests.small import last_round, same_bits

Matrix = NDArray[np.float64]
W0 = np.array([[0.1, -0.2], [0.3, 0.4]], dtype=np.float32)
START = (np.array([[0.5, -0.3]]), np.array([[0.2], [-0.4]]))
RANK, ALPHA, ETA = 1, 3.0, 0.5
NAMES = ("linear.lora_A.default.weight", "linear.lora_B.default.weight")


def local_steps(
    factors: tuple[Matrix, Matrix], client: int, count: int, rate: float
) -> tuple[Matrix, Matrix]:
    A, B = factors
    s = ALPHA / RANK
    for _ in range(count):
        G = logit_gradient(X[client] @ (W0 + s * B @ A).T, Y[client]).T @ X[client]
        A, B = A - rate * s * B.T @ G, B - rate * s * G @ A.T
    return A, B


def as_state(factors: tuple[Matrix, Matrix]) -> Params:
    return {n: torch.tensor(f).float() for n, f in zip(NAMES, factors, strict=True)}


def make(**fields: float) -> tuple[FedLoRA, Task]:
    method = FedLoRA(rank=RANK, lora_alpha=ALPHA, optimiser=Optimiser("sgd", lr=ETA), **fields)  # type: ignore[arg-type]
    return method, Task(linear_backbone(W0), method.adapt)


def test_one_round_averages_each_factor() -> None:
    method, task = make()
    server, kept = one_round(method, task, as_state(START), [{}, {}], steps=2)
    assert kept == [{}, {}]
    clients = [local_steps(START, client, 2, ETA) for client in (0, 1)]
    for at, name in enumerate(NAMES):
        mean = 0.25 * clients[0][at] + 0.75 * clients[1][at]
        np.testing.assert_allclose(server[name].numpy(), mean, atol=1e-6)


def test_before_use_the_factors_take_their_own_steps() -> None:
    method, task = make(finetune_passes=3, finetune_lr=0.2)
    assert method.finetune_passes == 3
    batches = [batch_of(1)] * 3
    tuned = method.finetune(task, as_state(START), batches, ClientContext(key(0)))
    for value, expected in zip(tuned.values(), local_steps(START, 1, 3, 0.2 * ETA), strict=True):
        np.testing.assert_allclose(value.numpy(), expected, atol=1e-6)
    A, B = method.lora(task, tuned)["linear"]
    np.testing.assert_allclose(B @ A, ALPHA / RANK * tuned[NAMES[1]] @ tuned[NAMES[0]], rtol=1e-6)


@pytest.mark.slow
def test_it_is_fedit_in_training_and_fine_tuned_in_use() -> None:
    sgd = Optimiser("sgd", lr=0.05, momentum=0.9)
    ours, _ = last_round(FedLoRA(rank=2, optimiser=sgd))
    fedit, _ = last_round(FedAvg(trainable="lora", rank=2, optimiser=sgd))
    tuned, _ = last_round(FedAvgFT(trainable="lora", rank=2, optimiser=sgd))
    assert same_bits(ours.server, fedit.server)
    assert ours.evaluations == tuned.evaluations
    assert ours.evaluations != fedit.evaluations


@pytest.mark.parametrize("field", ["finetune_passes", "finetune_lr", "rank"])
def test_zero_is_refused(field: str) -> None:
    with pytest.raises(InputError, match=rf"methods\.fedlora\.{field} = 0.*greater than 0"):
        parse({"methods": {"fedlora": {field: 0}}})
