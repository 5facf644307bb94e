"""The quick max pooling is PyTorch's, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedtailor.pooling import QuickMaxPool2d, max_pool2d, quicken_pools

HOW: list[dict[str, Any]] = [
    {"kernel_size": 2, "stride": 2, "padding": 0, "dilation": 1, "ceil_mode": False},
    {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 0), "dilation": 1, "ceil_mode": True},
    {"kernel_size": 2, "stride": 1, "padding": 1, "dilation": 2, "ceil_mode": False},
]
DRAWS = torch.Generator().manual_seed(0)
# many windows with several greatest values
PICTURES = torch.randint(4, (3, 5, 9, 8), generator=DRAWS).float()


def plain(**how: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: F.max_pool2d(x, **how)


def quick(**how: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: max_pool2d(x, **how)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_values_and_gradients_are_pytorchs(how: dict[str, Any], dtype: torch.dtype) -> None:
    x = PICTURES.to(dtype)
    weights = torch.rand(F.max_pool2d(x, **how).shape, generator=DRAWS).to(dtype)
    for given in (x, x.contiguous(memory_format=torch.channels_last)):
        assert torch.equal(quick(**how)(given), plain(**how)(given))
        a, b = (
            torch.func.grad(lambda x, pool=pool: (pool(x) * weights).sum())(given)
            for pool in (quick(**how), plain(**how))
        )
        assert torch.equal(a, b)


@pytest.mark.parametrize("how", HOW)
def test_clients_side_by_side(how: dict[str, Any]) -> None:
    x = torch.stack([PICTURES, PICTURES.flip(0), PICTURES.roll(1, 2)], dim=1)
    got = torch.func.vmap(torch.func.grad(lambda x: quick(**how)(x).square().sum()), 1)(x)
    one = [torch.func.grad(lambda x: plain(**how)(x).square().sum())(x[:, k]) for k in range(3)]
    assert torch.equal(got, torch.stack(one))


def test_a_gradient_of_a_gradient() -> None:
    x, v = torch.rand(2, 2, 3, 4, 4, generator=DRAWS)
    a, b = (
        torch.func.vjp(torch.func.grad(lambda x, p=pool: p(x).pow(3).sum()), x)[1](v)[0]
        for pool in (quick(**HOW[0]), plain(**HOW[0]))
    )
    assert torch.equal(a, b)
    assert a.any()


def test_the_pools_of_a_model_are_replaced() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.MaxPool2d(2, ceil_mode=True), nn.MaxPool2d(2, return_indices=True)
    )
    x = torch.rand(2, 1, 9, 9, generator=DRAWS)
    before = model(x)
    quicken_pools(model)
    assert [type(m) for m in model] == [nn.Conv2d, QuickMaxPool2d, nn.MaxPool2d]
    for a, b in zip(before, model(x), strict=True):
        assert torch.equal(a, b)


def test_one_picture_without_a_batch() -> None:
    assert torch.equal(quick(**HOW[0])(PICTURES[0]), plain(**HOW[0])(PICTURES[0]))


def test_who_watches_torchs_functions_sees_it() -> None:
    seen = []

    class Watch(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with Watch():
        got = QuickMaxPool2d(2)(PICTURES)
    assert "max_pool2d" in seen
    assert torch.equal(got, F.max_pool2d(PICTURES, 2))
