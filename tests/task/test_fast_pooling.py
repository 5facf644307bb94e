"""The quick max pooling is PyTorch's, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from fedtailor.params import Params
from fedtailor.task.fast_pooling import FastMaxPool2d, use_fast_max_pool

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
    return FastMaxPool2d(**how)


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
        nn.Conv2d(1, 2, 3),
        nn.Tanh(),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.MaxPool2d(2, return_indices=True),
    )
    x = torch.rand(2, 1, 9, 9, generator=DRAWS)
    before = model(x)
    use_fast_max_pool(model)
    assert [type(m) for m in model] == [nn.Conv2d, nn.Tanh, FastMaxPool2d, nn.MaxPool2d]
    for a, b in zip(before, model(x), strict=True):
        assert torch.equal(a, b)


def chain(*between: nn.Module, channels: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(channels, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3), *between,
        nn.ReLU(), nn.Conv2d(6, 5, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(20, 3),
    )  # fmt: skip


def value_and_gradient(model: nn.Module, x: Tensor) -> tuple[Tensor, Params]:
    def loss(state: Params, x: Tensor) -> Tensor:
        value: Tensor = functional_call(model, state, (x,)).square().sum()
        return value

    state = {name: value.detach() for name, value in model.named_parameters()}
    gradient, value = torch.func.grad_and_value(loss)(state, x)
    return value, gradient


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("between", [(), (nn.BatchNorm2d(6),)])
def test_a_chain_computes_the_same(channels: int, between: tuple[nn.Module, ...]) -> None:
    x = torch.randn(7, channels, 16, 16, generator=DRAWS)
    model = chain(*between, channels=channels).eval()
    expected = value_and_gradient(model, x)
    use_fast_max_pool(model)
    torch.testing.assert_close(value_and_gradient(model, x), expected, rtol=1e-4, atol=1e-5)
    many = x.view(1, 7, channels, 16, 16).expand(2, -1, -1, -1, -1)
    both = torch.func.vmap(partial(value_and_gradient, model))(many)
    stacked = {name: torch.stack([v, v]) for name, v in expected[1].items()}
    torch.testing.assert_close(both, (expected[0].expand(2), stacked), rtol=1e-4, atol=1e-5)


def test_channels_lie_side_by_side_up_to_a_pool() -> None:
    model = chain()
    use_fast_max_pool(model)
    laid_out: list[bool] = []

    def look(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        laid_out.append(output.is_contiguous(memory_format=torch.channels_last))

    for module in model:
        if isinstance(module, nn.Conv2d | nn.MaxPool2d):
            module.register_forward_hook(look)
    x = torch.randn(2, 1, 16, 16, generator=DRAWS)
    model(x)
    assert laid_out == [True, False, True, True, False]  # what a pool gives is as any other code
    laid_out.clear()
    with Watch():
        model(x)
    assert not any(laid_out)


def test_modules_of_a_chain_may_be_run_one_by_one() -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.ReLU(), nn.MaxPool2d(2))
    x = torch.randn(3, 2, 8, 8, generator=DRAWS)
    before = model[:2](x)
    use_fast_max_pool(model)
    torch.testing.assert_close(model[:2](x), before)
    torch.testing.assert_close(model[0](input=x), model[0](x))


def test_an_input_that_others_may_use_is_rectified_where_it_is() -> None:
    chain = nn.Sequential(nn.ReLU(inplace=True), nn.MaxPool2d(2))
    use_fast_max_pool(chain)
    x = torch.full((1, 1, 2, 2), -1.0)
    chain(x)
    assert x.eq(0).all()


class Watch(TorchFunctionMode):
    """Notes the torch functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_one_picture_without_a_batch() -> None:
    assert torch.equal(quick(**HOW[0])(PICTURES[0]), plain(**HOW[0])(PICTURES[0]))


def test_who_watches_torchs_functions_sees_the_models_own() -> None:
    model = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2))
    expected = model(PICTURES)
    use_fast_max_pool(model)
    with Watch() as watch:
        got = model(PICTURES)
    seen = [name for name in watch.seen if name in ("relu", "max_pool2d")]
    assert seen == ["relu", "max_pool2d"]
    assert torch.equal(got, expected)
