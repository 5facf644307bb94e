"""FedBABU by hand: a body trained under a head that stays, then fine-tuning, in NumPy."""

import numpy as np
import pytest
import torch

from fedtailor.errors import InputError
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedbabu import FedBABU
from fedtailor.optim import ClientContext, Optimiser
from fedtailor.random import key
from fedtailor.runs.experiment import parse
from fedtailor.task.task import Task
from tests.golden import X, Y, batch_of, one_round, two_layer_backbone, two_layer_gradients
from tests.small import digits_backbone, last_round, same_bits

U = np.array([[0.1, -0.2], [0.3, 0.4], [-0.5, 0.2]], dtype=np.float32)
V = np.array([[0.2, -0.3, 0.5], [-0.1, 0.4, 0.6]], dtype=np.float32)
SGD = Optimiser("sgd", lr=0.05, momentum=0.9)


def test_one_round_averages_bodies_trained_under_the_first_head() -> None:
    eta = 0.5
    method = FedBABU(optimiser=Optimiser("sgd", lr=eta))
    task = Task(two_layer_backbone(U, V), method.adapt)
    expected = np.zeros_like(U, dtype=np.float64)
    for share, x, y in zip([0.25, 0.75], X, Y, strict=True):
        u = U.astype(np.float64)
        for _ in range(3):
            u = u - eta * two_layer_gradients(u, V.astype(np.float64), x, y)[0]
        expected += share * u
    server, kept = one_round(method, task, method.init_server(task, 2, key(0)), [{}, {}])
    assert kept == [{}, {}]
    assert server.keys() == {"body.weight"}
    np.testing.assert_allclose(server["body.weight"].numpy(), expected, atol=1e-6)
    whole = method.global_state(task, server)
    assert whole is not None
    assert whole["head.weight"].equal(torch.tensor(V))


@pytest.mark.parametrize("part", ["head", "body", "all"])
def test_fine_tuning_moves_the_chosen_part(part: str) -> None:
    method = FedBABU(
        optimiser=Optimiser("sgd", lr=0.5), finetune_part=part, finetune_lr=0.2, finetune_passes=2
    )
    task = Task(two_layer_backbone(U, V), method.adapt)
    u, v = U.astype(np.float64) + 1, V.astype(np.float64)
    state = {"body.weight": task.state["body.weight"] + 1}
    for _ in range(2):
        du, dv = two_layer_gradients(u, v, X[1], Y[1])
        u = u - 0.2 * 0.5 * du * (part != "head")
        v = v - 0.2 * 0.5 * dv * (part != "body")
    tuned = method.finetune(task, state, [batch_of(1)] * 2, ClientContext(key(0)))
    np.testing.assert_allclose(tuned["body.weight"].numpy(), u, atol=1e-6)
    np.testing.assert_allclose(tuned["head.weight"].numpy(), v, atol=1e-6)
    assert method.finetune_passes == 2


@pytest.mark.slow
def test_the_head_never_moves_and_the_body_is_that_of_fedavg_without_it() -> None:
    ours = last_round(FedBABU(optimiser=SGD, finetune_passes=1))[0].server
    assert not any(name.startswith("head.") for name in ours)
    theirs = last_round(FedAvg(optimiser=SGD, layers=("conv", "norm", "hidden")))[0].server
    assert same_bits(ours, theirs)
    method = FedBABU()
    task = Task(digits_backbone(), method.adapt)
    whole = method.global_state(task, ours)
    assert whole is not None
    assert whole.keys() == task.state.keys()
    assert all(whole[name].equal(task.state[name]) for name in ("head.weight", "head.bias"))


@pytest.mark.slow
def test_another_part_can_be_frozen() -> None:
    server = last_round(FedBABU(frozen=("h*",), finetune_passes=1))[0].server
    assert all(name.startswith(("conv.", "norm.")) for name in server)


def test_bad_input_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"fedbabu\.finetune_part = 'full': input should be 'head'"
    ):
        parse({"methods": {"fedbabu": {"finetune_part": "full"}}})
    with pytest.raises(InputError, match=r"frozen = the task head matches all of what is trained"):
        last_round(FedBABU(trainable="head"))
