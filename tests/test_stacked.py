import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtailor import params, stacked
from tests.test_params import SHAPES, tree

MANY = torch.randn(6, 215_000, generator=torch.Generator().manual_seed(0))


@given(SHAPES, st.integers(1, 4))
def test_weighted_sum_is_linear(shapes: dict[str, tuple[int, ...]], c: int) -> None:
    trees = [tree(shapes, seed) for seed in range(c)]
    weights = torch.arange(1.0, c + 1)
    got = stacked.weighted_sum(params.stack(trees), weights)
    for name in shapes:
        expected = sum(float(w) * t[name].double() for w, t in zip(weights, trees, strict=True))
        torch.testing.assert_close(got[name].double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_sums_of_many_rows_and_chunks_are_exact_but_for_the_last_digit(dtype: torch.dtype) -> None:
    """More rows than float32 adds up, more columns than one chunk."""
    rng = np.random.default_rng(0)
    value = torch.tensor(rng.normal(size=(70, 66_000)) * 100).to(dtype)
    weights = torch.tensor(rng.dirichlet(np.ones(70)))
    assert len(list(stacked.column_chunks(value))) > 1
    got = stacked.weighted_sum({"x": value, "one": value[:, 0]}, weights)
    expected = weights.numpy() @ value.double().numpy()
    size = (weights.numpy() @ np.abs(value.double().numpy())).max()
    eps = {torch.int64: 1 / size, torch.float64: 1e-15}.get(dtype, 0)  # integers: the fraction
    off = eps or 2 * torch.finfo(dtype).eps
    np.testing.assert_allclose(got["x"].double(), expected, rtol=0, atol=off * size)
    assert got["x"].dtype == dtype
    torch.testing.assert_close(got["one"], got["x"][0])  # another order of summation


def test_a_chunk_lies_where_the_uploads_do() -> None:
    value = torch.zeros(40, 30, 1000)
    first, *_ = stacked.column_chunks(value)
    assert first.data_ptr() == value.data_ptr()


def test_products_with_the_mean_of_many_clients_and_tensors() -> None:
    """More rows than one tile, more columns than one chunk, a tensor a name."""
    rng = np.random.default_rng(0)
    updates = (rng.normal(size=(40, 28_005)) * 1e-4 + 1e-4).astype(np.float32)
    updates[3] *= -1
    updates[4] *= 10
    mean = updates.astype(np.float64).mean(0)
    expected = updates @ mean, np.linalg.norm(updates.astype(np.float64), axis=1)
    table = torch.tensor(updates)
    by_name = {"b": table[:, 27_000:], "a": table[:, :27_000].view(40, 27, 1000)}
    for form in (table, by_name):
        for dtype, off in ((None, 1e-5), (torch.float64, 1e-12)):
            dots, norms, mean_norm = stacked.products_with_mean(form, dtype)
            np.testing.assert_allclose(dots, expected[0], rtol=off)
            np.testing.assert_allclose(norms, expected[1], rtol=off)
            np.testing.assert_allclose(mean_norm, np.linalg.norm(mean), rtol=off)
            assert dots.dtype == norms.dtype == mean_norm.dtype == torch.float64


def test_products_with_offsets_survive_a_large_common_part() -> None:
    rng = np.random.default_rng(1)
    common = 100 * rng.normal(size=(1 << 19) + 5)
    models = (common + 1e-3 * rng.normal(size=(2, len(common)))).astype(np.float32)
    updates = (rng.normal(size=(2, len(common))) + common).astype(np.float32)
    got = stacked.products_with_offsets(torch.tensor(updates), torch.tensor(models))
    exact = models.astype(np.float64)
    expected = updates.astype(np.float64) @ (exact - exact[0]).T
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_a_ratio_is_0_where_nothing_is_divided() -> None:
    a, b = torch.tensor([2.0, 0.0, 3.0]), torch.tensor([4.0, 0.0, 0.0])
    assert stacked.ratio(a, b).tolist() == [0.5, 0.0, 0.0]


def test_distances_over_many_columns_and_tensors() -> None:
    expected = torch.cdist(MANY.double(), MANY.double()).square()
    got = stacked.squared_distances(
        {"a": MANY[:, :175_000], "b": MANY[:, 175_000:].view(6, 200, 200)}
    )
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-6)


def test_directions_from_a_centre() -> None:
    centre = {"a": MANY[0], "b": torch.zeros(())}
    uploads = {"a": MANY, "b": torch.ones(6)}
    r, products = stacked.directions_from(uploads, centre)
    difference = torch.cat([MANY - MANY[0], torch.ones(6, 1)], 1).double()
    torch.testing.assert_close(r, difference.norm(dim=1))
    unit = difference / difference.norm(dim=1, keepdim=True)
    torch.testing.assert_close(products, unit @ unit.T)
