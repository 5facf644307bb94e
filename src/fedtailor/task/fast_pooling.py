"""Max pooling, and convolutions before it, that are fast on a CPU.

PyTorch's max pooling takes a picture value by value if the values of a channel lie side by side in
memory, and eight or sixteen channels at once if the values of a position do (``channels_last``).
Its convolutions are as fast or faster with the second layout. So `FastMaxPool2d` pools pictures in
that layout, and the convolutions that lead to a pool in a chain get it, too. The output of a pool,
a quarter of the size or less, is contiguous again, for any code that comes after it.

Under a ``TorchFunctionMode``, which must see a model's own functions, nothing is changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from ..torch_private import under_vmap
from .surgery import Chain, replace


def use_fast_max_pool(model: nn.Module) -> None:
    """Replace every nn.MaxPool2d that returns no indices by a `FastMaxPool2d`, in place.

    Convolutions that lead to a pool in a chain get their input in its layout.
    """
    for path, module in list(model.named_modules()):
        if type(module) is nn.MaxPool2d and not module.return_indices:
            sizes = module.kernel_size, module.stride, module.padding, module.dilation
            replace(model, path, FastMaxPool2d(*sizes, ceil_mode=module.ceil_mode))
    for module in list(model.modules()):
        if type(module).forward in (nn.Sequential.forward, Chain.forward):
            _prepare_chain(module)


class FastMaxPool2d(nn.MaxPool2d):
    """`nn.MaxPool2d` by `max_pool2d`; ``channels_last``: its input has that layout, unless clients
    run at once."""

    channels_last = False

    def forward(self, input: Tensor) -> Tensor:
        return max_pool2d(
            input, self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode,
            self.channels_last,
        )  # fmt: skip


def _prepare_chain(chain: nn.Module) -> None:
    """Lay out the inputs of the convolutions before the pools of a chain."""
    modules = list(chain.children())
    for index, pool in enumerate(modules):
        if not isinstance(pool, FastMaxPool2d):
            continue
        for earlier in reversed(modules[:index]):
            if isinstance(earlier, nn.Conv2d):
                earlier.register_forward_pre_hook(_channels_last_input)
                pool.channels_last = True
            elif not isinstance(earlier, nn.ReLU):
                break


def _channels_last_input(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    if len(inputs) != 1:  # the caller passes it by keyword
        return inputs
    (x,) = inputs
    if x.dim() != 4 or x.device.type != "cpu" or has_torch_function((x,)):
        return inputs
    return (_channels_last(x),)


def max_pool2d(
    input: Tensor,
    kernel_size: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil_mode: bool,
    channels_last: bool = False,
) -> Tensor:
    """Pool as PyTorch's function of this name, with the same bits in values and gradients.

    ``input`` is ``[b, C, H, W]`` or ``[C, H, W]``; sizes are pixels, one for both sides or one for
    each; ``channels_last``, its layout, affects nothing but the time.

    >>> x = torch.arange(16.0).view(1, 1, 4, 4)
    >>> max_pool2d(x, 2, 2, 0, 1, False).flatten().tolist()
    [5.0, 7.0, 13.0, 15.0]
    """
    sizes = kernel_size, stride, padding, dilation
    options: list[Any] = [[size, size] if isinstance(size, int) else list(size) for size in sizes]
    options.append(ceil_mode)
    pooled: Tensor
    if has_torch_function((input,)):
        pooled = handle_torch_function(max_pool2d, (input,), input, *options)
    elif input.dim() != 4 or input.device.type != "cpu":
        pooled = torch.max_pool2d(input, *options)
    else:
        pool: Any = _MaxPool
        pooled, _ = pool.apply(input, channels_last, *options)
    return pooled


class _MaxPool(torch.autograd.Function):
    """The greatest value of every window of ``[b, C, H, W]``, and its index in ``[H W]``."""

    @staticmethod
    def forward(x: Tensor, channels_last: bool, *options: Any) -> tuple[Tensor, Tensor]:
        x = x.contiguous(memory_format=torch.channels_last)
        y, indices = torch.ops.aten.max_pool2d_with_indices(x, *options)
        return y.contiguous(), indices if channels_last else indices.contiguous()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.channels_last, *ctx.options = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, output[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, indices = ctx.saved_tensors
        g = _channels_last(gradients[0]) if ctx.channels_last else gradients[0].contiguous()
        pool_backward = torch.ops.aten.max_pool2d_with_indices_backward
        return pool_backward(g, x, *ctx.options, indices), None, None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, channels_last: bool, *options: Any) -> Any:
        x = x.movedim(in_dims[0], 0)
        y, indices = _MaxPool.apply(x.flatten(0, 1), False, *options)  # type: ignore[no-untyped-call]
        return (y.unflatten(0, x.shape[:2]), indices.unflatten(0, x.shape[:2])), (0, 0)


def _channels_last(x: Tensor) -> Tensor:
    if not under_vmap():
        return _copy_channels_last(x)
    function: Any = _ChannelsLast
    result: Tensor = function.apply(x)
    return result


def _copy_channels_last(x: Tensor) -> Tensor:
    if x.shape[1] > 1:
        return x.contiguous(memory_format=torch.channels_last)
    batch, _, height, width = x.shape  # one channel has both layouts; the strides say which
    return x.contiguous().view(batch, height, width, 1).movedim(3, 1)


class _ChannelsLast(torch.autograd.Function):
    """``[b, C, H, W]`` in the layout ``channels_last``.

    Where clients run at once the input stays as it is: a convolution takes all their channels
    together.
    """

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return _copy_channels_last(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return x, in_dims[0]
