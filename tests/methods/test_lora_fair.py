"""LoRA-FAIR by hand: two clients train LoRA in NumPy, the server solves its least squares."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedtailor.errors import InputError
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.lora_fair import LoRAFAIR, correction
from fedtailor.optim import Optimiser
from fedtailor.runs.experiment import parse
from fedtailor.task.task import Task
from tests.golden import X, Y, linear_backbone, one_round, softmax_gradient
from tests.small import last_round, same_bits

F64 = NDArray[np.float64]
W0 = np.array([[0.1, -0.2], [0.3, 0.4]], dtype=np.float32)
A_NAME, B_NAME = (f"linear.lora_{f}.default.weight" for f in "AB")
P = (0.25, 0.75)


def least_squares(A: F64, B: F64, W: F64, lam: float) -> F64:
    """argmin_D ||W - (B + D) A||^2 + lam ||D||^2, as one system of equations for D^T."""
    rows = np.concatenate([A.T, np.sqrt(lam) * np.eye(len(A))])
    right = np.concatenate([(W - B @ A).T, np.zeros((len(A), len(B)))])
    return np.linalg.lstsq(rows, right, rcond=None)[0].T


def test_one_round_minimises_the_distance() -> None:
    eta, lam, s = 0.5, 0.05, 4.0
    method = LoRAFAIR(lam=lam, rank=1, lora_alpha=4.0, optimiser=Optimiser("sgd", lr=eta))
    task = Task(linear_backbone(W0), method.adapt)
    server = {**task.state, B_NAME: torch.tensor([[0.2], [-0.1]])}
    pairs = []
    for x, y in zip(X, Y, strict=True):
        A, B = (server[name].double().numpy() for name in (A_NAME, B_NAME))
        for _ in range(3):
            g = softmax_gradient(W0 + s * B @ A, x, y)
            A, B = A - eta * s * B.T @ g, B - eta * s * g @ A.T
        pairs.append((A, B))
    A, B = (sum(p * pair[i] for p, pair in zip(P, pairs, strict=True)) for i in (0, 1))
    W = sum(p * B_k @ A_k for p, (A_k, B_k) in zip(P, pairs, strict=True))
    found, kept = one_round(method, task, server, [{}, {}])
    assert kept == [{}, {}]
    Delta = least_squares(A, B, W, lam)
    assert np.abs(Delta).max() > 1e-2
    np.testing.assert_allclose(found[A_NAME].numpy(), A, atol=1e-6)
    np.testing.assert_allclose(found[B_NAME].numpy(), B + Delta, atol=1e-6)


@given(st.integers(1, 5), st.integers(1, 3), st.integers(0, 1000), st.floats(1e-3, 10.0))
def test_the_correction_is_the_ridge_solution(c: int, r: int, seed: int, lam: float) -> None:
    rng = np.random.default_rng(seed)
    A, B, p = rng.normal(size=(c, r, 4)), rng.normal(size=(c, 5, r)), rng.random(c) + 0.1
    p /= p.sum()
    mean_A, mean_B = np.tensordot(p, A, 1), np.tensordot(p, B, 1)
    W = np.tensordot(p, B @ A, 1)
    got = correction(*map(torch.tensor, (A, B, p)), lam)
    assert got.dtype == torch.float64
    np.testing.assert_allclose(got.numpy(), least_squares(mean_A, mean_B, W, lam), atol=1e-8)


def fedavg() -> FedAvg:
    return FedAvg(trainable="lora", rank=2, lora_alpha=4.0, optimiser=Optimiser(lr=0.05))


def fair(lam: float) -> LoRAFAIR:
    return LoRAFAIR(lam=lam, rank=2, lora_alpha=4.0, optimiser=Optimiser(lr=0.05))


def test_with_one_client_it_is_fedavg() -> None:
    ours, theirs = (last_round(method, sizes=(23,))[0] for method in (fair(0.01), fedavg()))
    assert same_bits(ours.server, theirs.server)


@pytest.mark.slow
def test_lambda_weighs_the_correction() -> None:
    ours, theirs = last_round(fair(1e12))[0].server, last_round(fedavg())[0].server
    for name, value in theirs.items():  # sums in another order
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)
    near = last_round(fair(0.01))[0].server
    different = [name for name in near if not near[name].equal(theirs[name])]
    assert any("lora_B" in name for name in different)

    g = torch.Generator().manual_seed(0)
    A, B = torch.randn(3, 2, 6, generator=g), torch.randn(3, 4, 2, generator=g)
    p = torch.tensor([0.2, 0.3, 0.5])

    def mean(value: torch.Tensor) -> torch.Tensor:
        return torch.einsum("c,cij->ij", p, value)

    def distance(lam: float) -> float:
        moved = mean(B) + correction(A, B, p, lam).float()
        return (mean(B @ A) - moved @ mean(A)).norm().item()

    assert distance(1e-6) < distance(1.0) < distance(1e6)


def test_a_lambda_of_zero_is_refused() -> None:
    with pytest.raises(InputError, match=r"methods\.lora-fair\.lam = 0.*greater than 0"):
        parse({"methods": {"lora-fair": {"lam": 0}}})
