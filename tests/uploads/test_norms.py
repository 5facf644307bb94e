"""Norms of uploads, and the bound that recent ones give."""

import math

import pytest
import torch

from fedtailor.uploads.chain import UploadContext
from fedtailor.uploads.collected import UploadStack
from fedtailor.uploads.norms import NormBound, update_norm


@pytest.mark.parametrize(
    ("recent", "norms", "limit"),
    [
        ([], [1e30], math.inf),  # nothing to compare it with
        ([], [1e-9, 1.0], math.inf),  # two don't show which is false
        ([(1.0,)], [50.0, 60.0], math.inf),
        ([(1.0, 2.0)], [50.0, 60.0], 20.0),  # two are too few to raise it
        ([(1e-9, 1.0), (1e-9,), (1e-9,)], [1e-9, 1.0], 10.0),  # one vote a client
        ([], [1.0, 3.0, 1e30], 30.0),
        ([(1.0, 2.0, 3.0, 4.0)], [5.0] * 3 + [1e30], 50.0),
        ([(1.0, 2.0, 3.0, 4.0)], [1.0] * 3, 20.0),  # of an even number the lower one
        ([(1.0, 2.0, 3.0)], [1e-9, 1e-9, 5.0], 20.0),  # tiny uploads don't lower it
        ([(1.0, 2.0, 3.0)], [50.0, 60.0, 70.0], 600.0),  # what most of a cohort need is allowed
        ([(0.0, 0.0)], [0.0, 0.0, 0.0, 5.0, 6.0, 1e30], 60.0),  # who changes nothing doesn't count
        ([(0.0,)], [0.0, 0.0, 0.0], math.inf),
    ],
)
def test_the_bound_follows_the_norms_of_others(
    recent: list[tuple[float, ...]], norms: list[float], limit: float
) -> None:
    rounds = tuple(dict(enumerate(of_round)) for of_round in recent)
    assert NormBound("refuse", None, 10.0, 0.5, rounds).limit(norms) == limit
    assert NormBound("refuse", 7.0, 10.0, 0.5, rounds).limit(norms) == 7.0


def test_a_norm_that_float32_can_not_square() -> None:
    upload = {"w": torch.tensor([3e30, 1.0]), "n": torch.tensor(10**9)}
    unchanged = {"w": torch.tensor([0.0, 1.0])}
    assert update_norm(upload, unchanged) == pytest.approx(3e30)
    upload["w"][1] = torch.inf
    assert update_norm(upload, unchanged) == math.inf


def test_a_clip_reaches_a_product_once_and_leaves_alone_what_is_no_part_of_an_update() -> None:
    upload = {"A": torch.tensor([[3.0, 0.0]]), "B": torch.tensor([[4.0]]), "path": torch.zeros(1)}
    uploads = UploadStack(1, 1e9)
    uploads.put(0, {**upload, "path": torch.tensor([12.0])})  # a norm of 13
    zeros = {name: torch.zeros_like(value) for name, value in upload.items()}
    at = UploadContext(
        0, (), lambda *_: zeros, beside=("path",), products=[("A", "B")], clients=(0,)
    )
    NormBound("clip", 6.5, 10.0, 0.5).gather(uploads, at)
    clipped = uploads.upload(0)
    torch.testing.assert_close(clipped["B"] @ clipped["A"], upload["B"] @ upload["A"] / 2)
    assert clipped["path"].item() == 12.0
