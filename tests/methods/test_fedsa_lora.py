"""FedSA-LoRA by hand: A is averaged, B stays with each client."""

import numpy as np
import pytest
import torch

from fedtailor.errors import InputError
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedsa_lora import FedSALoRA
from fedtailor.optim import Optimiser
from fedtailor.runs.experiment import parse
from fedtailor.task.task import Task
from tests.golden import X, Y, linear_backbone, one_round
from tests.lora import A, B, W, lora_steps
from tests.small import digits_backbone, last_round, same_bits

SGD = Optimiser("sgd", lr=0.3)


def test_two_rounds_average_a_and_keep_b() -> None:
    method = FedSALoRA(rank=2, lora_alpha=3.0, optimiser=SGD)
    task = Task(linear_backbone(W), method.adapt)
    server = {A: task.state[A]}
    private = [{B: torch.zeros(3, 2)}, {B: torch.tensor([[0.1, 0.2], [0.0, -0.3], [0.2, 0.0]])}]
    a, bs = server[A].double().numpy(), [p[B].double().numpy() for p in private]
    for _ in range(2):
        trained = [lora_steps(W.astype(np.float64), a, bs[k], 1.5, X[k], Y[k], 0.3) for k in (0, 1)]
        a, bs = 0.25 * trained[0][0] + 0.75 * trained[1][0], [b for _, b in trained]
        server, private = one_round(method, task, server, private)
    assert server.keys() == {A}
    np.testing.assert_allclose(server[A].numpy(), a, atol=1e-6)
    for k in (0, 1):
        assert private[k].keys() == {B}
        np.testing.assert_allclose(private[k][B].numpy(), bs[k], atol=1e-6)
    (factor_A, factor_B) = method.lora(task, {**server, **private[0]})["linear"]
    np.testing.assert_allclose(factor_B @ factor_A, 1.5 * bs[0] @ a, atol=1e-6)


def test_one_client_alone_is_fedavg_on_lora() -> None:
    sgd = Optimiser("sgd", lr=0.05, momentum=0.9)
    ours, store = last_round(FedSALoRA(rank=4, optimiser=sgd), sizes=(23,))
    theirs, _ = last_round(FedAvg(trainable="lora", rank=4, optimiser=sgd), sizes=(23,))
    assert same_bits({**ours.server, **store.read(0)}, theirs.server)


@pytest.mark.slow
def test_the_head_is_shared_unless_told() -> None:
    backbone = digits_backbone()
    for private in (False, True):
        method = FedSALoRA(private_head=private)
        task = Task(backbone, method.adapt)
        method.check(task, 5, 5, 1)
        last, store = last_round(method)
        assert ("head.weight" in last.server) == (not private)
        assert ("head.weight" in store.read(0)) == private
        state = method.global_state(task, last.server)
        if private:
            assert state is None
        else:
            assert state is not None
            assert state.keys() == task.state.keys()
            assert state["head.weight"].equal(last.server["head.weight"])
            assert not state["hidden.lora_B.default.weight"].any()


def test_bad_input_is_refused() -> None:
    method = FedSALoRA(private_head=True)
    task = Task(linear_backbone(np.ones((9, 9), dtype=np.float32)), method.adapt)
    with pytest.raises(InputError, match=r"fedsa-lora\.private_head is true.*model\.head"):
        method.check(task, 2, 2, 1)
    with pytest.raises(InputError, match=r"methods\.fedsa-lora\.rank = 0.*greater than 0"):
        parse({"methods": {"fedsa-lora": {"rank": 0}}})
