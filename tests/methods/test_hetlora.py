"""HetLoRA by hand: truncation, self-pruning, and the sum weighted by the updates' norms."""

import numpy as np
import pytest
import torch

from fedtailor.engine.costs import wire_bytes
from fedtailor.errors import InputError
from fedtailor.method import Cohort
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.hetlora import HetLoRA
from fedtailor.optim import Optimiser
from fedtailor.params import Params
from fedtailor.random import key
from fedtailor.runs.experiment import parse
from fedtailor.task.task import Task
from tests.golden import SIZES, X, Y, linear_backbone, one_round, softmax_gradient
from tests.lora import F64, A, B, W, lora_steps
from tests.small import digits_backbone, last_round, same_bits

SGD = Optimiser("sgd", lr=0.1)
START = {
    A: torch.tensor([[0.5, -0.25], [0.4, 1.0]]),
    B: torch.tensor([[0.5, 0.2], [-0.3, 0.1], [0.2, -0.4]]),
}


def pruned_steps(a: F64, b: F64, s: float, lam: float, k: int) -> tuple[F64, F64]:
    """Three steps with the term on the second component of two."""
    for _ in range(3):
        g = softmax_gradient(W + s * b @ a, X[k], Y[k])
        to_a, to_b = s * b.T @ g, s * g @ a.T
        norm_a, norm_b = np.linalg.norm(a[1]), np.linalg.norm(b[:, 1])
        to_a[1] += lam * norm_b * a[1] / norm_a
        to_b[:, 1] += lam * norm_a * b[:, 1] / norm_b
        a, b = a - 0.1 * to_a, b - 0.1 * to_b
    return a, b


@pytest.mark.parametrize("prune", [False, True])
def test_one_round_of_two_ranks(prune: bool) -> None:
    gamma, lam = 0.5, 2.0 if prune else 0.0
    method = HetLoRA(gamma=gamma, lam=lam, rank=(1, 2), lora_alpha=3.0, optimiser=SGD)
    task = Task(linear_backbone(W), method.adapt)
    server = {**method.init_server(task, 2, key(0)), **START}
    assert server["ranks"].tolist() == [1, 2]
    a, b = (START[name].double().numpy() for name in (A, B))
    a0, b0 = lora_steps(W + 0.0, a[:1], b[:, :1], 1.5, X[0], Y[0], 0.1)
    a1, b1 = pruned_steps(a, b, 1.5, lam, 1)
    tails = [np.linalg.norm(m[1]) * np.linalg.norm(n[:, 1]) for m, n in ((a, b), (a1, b1))]
    assert (tails[1] < tails[0]) == prune
    if prune:
        a1, b1 = a1[:1], b1[:, :1]
    S = np.array([np.linalg.norm(b0 @ a0), np.linalg.norm(b1 @ a1)])
    p = S / S.sum()
    expected_a, expected_b = a.copy(), b.copy()  # what nobody holds stays
    if not prune:
        expected_a[1], expected_b[:, 1] = p[1] * a1[1], p[1] * b1[:, 1]  # beside zeros
    expected_a[0] = p[0] * a0[0] + p[1] * a1[0]
    expected_b[:, 0] = p[0] * b0[:, 0] + p[1] * b1[:, 0]
    new, kept = one_round(method, task, server, [{}, {}])
    assert kept == [{}, {}]
    np.testing.assert_allclose(new[A].numpy(), expected_a, atol=1e-6)
    np.testing.assert_allclose(new[B].numpy(), expected_b, atol=1e-6)
    assert new["ranks"].tolist() == ([1, 1] if prune else [1, 2])
    received = method.send(task, new, 1)
    assert received[A].shape == ((1, 2) if prune else (2, 2))
    factor_A, factor_B = method.lora(task, received)["linear"]
    r = len(received[A])
    np.testing.assert_allclose(
        factor_B @ factor_A, 1.5 * expected_b[:, :r] @ expected_a[:r], atol=1e-6
    )


def test_one_client_alone_without_pruning_is_fedavg_on_lora() -> None:
    sgd = Optimiser("sgd", lr=0.05, momentum=0.9)
    ours, _ = last_round(HetLoRA(gamma=1.0, rank=4, optimiser=sgd), sizes=(23,))
    theirs, _ = last_round(FedAvg(trainable="lora", rank=4, optimiser=sgd), sizes=(23,))
    server = dict(ours.server)
    assert server.pop("ranks").tolist() == [4]
    assert same_bits(server, theirs.server)


@pytest.mark.slow
def test_the_term_and_gamma_decide_what_is_pruned() -> None:
    def ranks(**fields: float) -> list[int]:
        method = HetLoRA(rank=(4, 8), **fields)  # type: ignore[arg-type]
        return last_round(method, rounds=3)[0].server["ranks"].tolist()

    assert ranks(gamma=1.0, lam=0.3) == [4, 8, 4, 8, 4]
    half, most = ranks(gamma=0.5, lam=0.3), ranks(gamma=0.9, lam=0.3)
    assert sum(half) < sum(most) < sum(ranks(gamma=0.9, lam=0.0)) < 28
    assert min(half) >= 1


def test_without_any_update_weights_are_by_examples() -> None:
    method = HetLoRA(rank=2)
    task = Task(linear_backbone(W), method.adapt)
    server = {**method.init_server(task, 2, key(0)), **START}
    As = torch.stack([torch.ones(2, 2), torch.zeros(2, 2)])
    uploads: Params = {A: As, B: torch.zeros(2, 3, 2), "rank": torch.tensor([2, 2])}
    new = method.aggregate(task, server, uploads, Cohort((0, 1), SIZES, 1, key(0)))
    torch.testing.assert_close(new[A], torch.full((2, 2), 0.25))


def test_a_pruned_client_gets_and_sends_less() -> None:
    method = HetLoRA(rank=(8, 4), gamma=0.5)
    task = Task(digits_backbone(), method.adapt)
    server = method.init_server(task, 2, key(0))
    before = wire_bytes(method.send(task, server, 0))["float32"]
    pruned = {**server, "ranks": torch.tensor([4, 4])}
    received = method.send(task, pruned, 0)
    assert before - wire_bytes(received)["float32"] == 4 * 4 * (16 + 54)
    upload = method.upload(task, received, {**received, "rank": torch.tensor(2)})
    name = "hidden.lora_A.default.weight"
    assert upload[name].shape == (8, 54)
    assert not upload[name][2:].any()
    packed = method.pack(task, upload)
    assert packed[name].shape == (2, 54)
    assert "rank" not in packed
    assert same_bits(method.unpack(task, packed), upload)


def test_clients_see_their_ranks_in_the_figures() -> None:
    method = HetLoRA(rank=(1, 2))
    task = Task(linear_backbone(W), method.adapt)
    server = method.init_server(task, 3, key(0))
    assert method.server_diagnostics(task, server, [2, 1])["ranks"].tolist() == [1, 2]


def test_bad_input_is_refused() -> None:
    for field, value in (("gamma", 0), ("gamma", 1.5), ("lam", -1)):
        with pytest.raises(InputError, match=rf"methods\.hetlora\.{field} = {value}"):
            parse({"methods": {"hetlora": {field: value}}})
    with pytest.raises(InputError, match=r"rank 3 is larger than the layer linear"):
        Task(linear_backbone(W), HetLoRA(rank=(1, 3)).adapt)
