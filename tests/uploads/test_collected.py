"""A cohort's uploads, in memory and on disk, and their mean."""

from pathlib import Path

import pytest
import torch

from fedtailor.params import Params, stack
from fedtailor.stacked import GROUP, weighted_sum
from fedtailor.uploads.collected import UploadMean, UploadStack


def filled(folder: Path, limit: float) -> UploadStack:
    stack = UploadStack(4, limit, folder)
    for client in (2, 0, 3, 1):
        upload: Params = {"w": torch.full((2, 3), float(client)), "n": torch.tensor(client)}
        stack.put(client, upload)
    return stack


@pytest.mark.parametrize("limit", [1e9, 0.0])
def test_a_row_a_client_whatever_the_order(tmp_path: Path, limit: float) -> None:
    stack = filled(tmp_path, limit)
    assert stack.params["w"].shape == (4, 2, 3)
    assert stack.params["w"][:, 1, 2].tolist() == [0, 1, 2, 3]
    assert stack.params["n"].tolist() == [0, 1, 2, 3]
    assert not list(tmp_path.iterdir())  # nothing that a kill could leave


@pytest.mark.parametrize("limit", [1e9, 0.0])
def test_rows_are_left_out_in_place(tmp_path: Path, limit: float) -> None:
    stack = filled(tmp_path, limit)
    start = stack.params["w"].data_ptr()
    stack.keep([1, 3])
    assert stack.params["w"][:, 0, 0].tolist() == [1, 3]
    assert stack.params["n"].tolist() == [1, 3]
    assert stack.params["w"].data_ptr() == start


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_the_mean_is_the_weighted_sum(dtype: torch.dtype) -> None:
    size = 2 * GROUP + 3
    draws = torch.Generator().manual_seed(0)
    given: list[Params] = [
        {
            "w": (100 * torch.randn(3, 4, generator=draws)).to(dtype),
            "one": torch.tensor(k).to(dtype),
        }
        for k in range(size)
    ]
    shares = torch.rand(size, generator=draws, dtype=torch.float64)
    shares /= shares.sum()
    mean = UploadMean(range(size), shares)
    for position, upload in enumerate(given):
        mean.put(position, upload)
    expected = weighted_sum(stack(given), shares)
    for name, value in mean.params.items():
        assert value.shape == (1, *expected[name].shape)
        assert value.dtype == dtype
        rtol, atol = {
            torch.float32: (1e-5, 1e-4), torch.bfloat16: (1e-2, 0.1), torch.float64: (1e-12, 1e-12)
        }.get(dtype, (0, 1))  # integers: the fraction is cut  # fmt: skip
        torch.testing.assert_close(value[0], expected[name], rtol=rtol, atol=atol)


def test_the_mean_is_the_same_bits_in_whatever_order_uploads_arrive() -> None:
    draws = torch.Generator().manual_seed(0)
    given: list[Params] = [{"w": torch.randn(50, generator=draws)} for _ in range(7)]
    order = [3, 0, 6, 1, 2, 5, 4]
    found = []
    for arrival in (order, range(7), reversed(range(7))):
        mean, passing = UploadMean(order, torch.full((7,), 1 / 7)), torch.zeros(50)
        for position in arrival:
            passing.copy_(given[position]["w"])  # valid until the next one
            mean.put(position, {"w": passing})
        found.append(mean.params["w"])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("present", [[0, 2, 3], [1], [0, 1, 2, 3]])
def test_the_mean_of_those_who_answer_has_their_weights(present: list[int]) -> None:
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    uploads: list[Params] = [{"w": torch.tensor([float(k), 1.0])} for k in range(4)]
    mean = UploadMean([2, 0, 3, 1])  # position 2 comes first, whether it answers or not
    for position in present:
        mean.put(position, uploads[position])
    shares = weights[present] / weights[present].sum()
    mean.weigh(shares)
    expected = weighted_sum(stack([uploads[k] for k in present]), shares)["w"]
    torch.testing.assert_close(mean.params["w"][0], expected, rtol=1e-6, atol=0)
