"""FedHFT by hand, equation by equation, in NumPy; then its degenerate cases, options and limits."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedtailor.methods.fedhft import (
    assign,
    keep_rows,
    recompress,
    row_importance,
    update_gram,
)
from fedtailor.random import key

F64 = NDArray[np.float64]
RNG = np.random.default_rng(0)


def tensor(value: F64) -> torch.Tensor:
    return torch.tensor(value).float()


def random_product(d_out: int, R: int, d_in: int, seed: int = 0) -> tuple[F64, F64]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(d_out, R)), rng.normal(size=(R, d_in))


def truncated(M: F64, rank: int) -> F64:
    u, s, v = np.linalg.svd(M, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ v[:rank]


@given(st.integers(1, 7), st.integers(1, 4), st.integers(1, 9), st.integers(0, 99))
def test_equation_6_is_the_squared_norm_of_each_row(
    d_out: int, r: int, d_in: int, seed: int
) -> None:
    B, A = random_product(d_out, r, d_in, seed)
    expected = np.array([sum((B[i] @ A[:, j]) ** 2 for j in range(d_in)) for i in range(d_out)])
    got = row_importance(torch.tensor(B), torch.tensor(A))
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-9)


def test_equation_7_masks_the_least_important_rows_the_first_of_equals_first() -> None:
    importance = torch.tensor([2.0, 0.5, 2.0, 0.5, 3.0])
    for ratio, masked in [
        (0.0, []), (0.19, []), (0.2, [1]), (0.4, [1, 3]), (0.6, [1, 3, 0]), (0.99, [1, 3, 0, 2]),
    ]:  # fmt: skip
        kept = keep_rows(importance, ratio)
        assert kept.dtype == torch.bool
        assert (~kept).nonzero()[:, 0].tolist() == sorted(masked)


@given(st.integers(1, 200), st.integers(0, 99), st.integers(0, 99))
def test_the_number_of_rows_masked_is_exact(d_out: int, percent: int, seed: int) -> None:
    importance = torch.tensor(np.random.default_rng(seed).integers(0, 4, d_out)).float()
    kept = keep_rows(importance, percent / 100)
    assert (~kept).sum() == percent * d_out // 100  # in whole numbers
    if percent * d_out // 100:
        assert importance[kept].min() >= importance[~kept].max()


def test_keep_rows_runs_for_many_clients_at_once_each_with_its_own_ratio() -> None:
    importance, ratios = torch.rand(3, 40), torch.tensor([0.0, 0.29, 0.9], dtype=torch.float64)
    together = torch.func.vmap(keep_rows)(importance, ratios)
    for k in range(3):
        assert together[k].equal(keep_rows(importance[k], ratios[k].item()))
    assert (~together).sum(1).tolist() == [0, 11, 36]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shape", [(12, 5, 9), (9, 20, 12), (6, 40, 7)])
def test_recompression_is_the_best_approximation(shape: tuple[int, int, int], exact: bool) -> None:
    B, A = random_product(*shape)
    for rank in (1, 3, 6):
        new_B, new_A = recompress(torch.tensor(B), torch.tensor(A), rank, exact)
        assert (new_B.shape, new_A.shape) == ((shape[0], rank), (rank, shape[2]))
        np.testing.assert_allclose((new_B @ new_A).numpy(), truncated(B @ A, rank), atol=1e-9)
        np.testing.assert_allclose(new_B.norm(dim=0), new_A.norm(dim=1), atol=1e-9)


def test_randomised_recompression_of_a_large_product_is_nearly_the_best() -> None:
    B, A = random_product(120, 60, 150)
    B = B * 0.9 ** np.arange(60)
    best = np.linalg.norm(B @ A - truncated(B @ A, 6))
    errors = []
    for seed in (0, 1):
        new_B, new_A = recompress(tensor(B), tensor(A), 6, key=key(seed))
        errors.append(np.linalg.norm(B @ A - (new_B @ new_A).numpy()) / best)
    assert errors[0] != errors[1]  # the key counts
    assert 1 <= min(errors)
    assert max(errors) < 1.01
    new_B, new_A = recompress(tensor(B), tensor(A), 6, exact=True)
    assert np.linalg.norm(B @ A - (new_B @ new_A).numpy()) / best == pytest.approx(1, abs=1e-5)


def test_recompression_of_a_product_of_lower_rank_pads_with_zeros() -> None:
    B, A = random_product(6, 2, 5)
    for exact in (False, True):
        new_B, new_A = recompress(tensor(B), tensor(A), 4, exact)
        np.testing.assert_allclose((new_B @ new_A).numpy(), B @ A, atol=1e-5)
        assert not new_B[:, 2:].any()
        assert not new_A[2:].any()
        zero_B, zero_A = recompress(torch.zeros(6, 2), tensor(A), 4, exact)
        assert not zero_B.any()
        assert not zero_A.any()


def test_the_gram_of_updates_is_that_of_their_products() -> None:
    Bs, As = RNG.normal(size=(4, 6, 2)), RNG.normal(size=(4, 2, 5))
    updates = np.stack([(B @ A).ravel() for B, A in zip(Bs, As, strict=True)])
    got = update_gram(torch.tensor(Bs), torch.tensor(As))
    np.testing.assert_allclose(got.numpy(), updates @ updates.T, atol=1e-12)
    rotation = np.linalg.qr(RNG.normal(size=(2, 2)))[0]  # other factors, the same products
    same = update_gram(torch.tensor(Bs @ rotation), torch.tensor(rotation.T @ As))
    torch.testing.assert_close(same, got)
