"""Max pooling that is quick on a CPU: the same numbers as PyTorch's, in a third of the time.

PyTorch's kernel goes through a picture value by value where a channel's values lie side by side,
and eight or sixteen channels at once where a position's do. So the picture is laid out the second
way for the search; what it finds, a quarter of the size or less, is laid out as before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from .layers import replace


class QuickMaxPool2d(nn.MaxPool2d):
    """`nn.MaxPool2d` by `max_pool2d`."""

    def forward(self, input: Tensor) -> Tensor:
        return max_pool2d(
            input, self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode
        )


def quicken_pools(model: nn.Module) -> None:
    """Replace every nn.MaxPool2d in ``model`` that gives no indices, in place."""
    for path, module in list(model.named_modules()):
        if type(module) is nn.MaxPool2d and not module.return_indices:
            sizes = module.kernel_size, module.stride, module.padding, module.dilation
            replace(model, path, QuickMaxPool2d(*sizes, ceil_mode=module.ceil_mode))


def max_pool2d(
    input: Tensor, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool
) -> Tensor:
    """As PyTorch's function of this name, bit by bit, and its gradient, too.

    >>> x = torch.arange(16.0).view(1, 1, 4, 4)
    >>> max_pool2d(x, 2, 2, 0, 1, False).flatten().tolist()
    [5.0, 7.0, 13.0, 15.0]
    """
    sizes = kernel_size, stride, padding, dilation
    how: list[Any] = [[size, size] if isinstance(size, int) else list(size) for size in sizes]
    how.append(ceil_mode)
    pooled: Tensor
    if has_torch_function((input,)):
        pooled = handle_torch_function(max_pool2d, (input,), input, *how)
    elif input.dim() != 4 or input.device.type != "cpu":
        pooled = torch.max_pool2d(input, *how)
    else:
        pool: Any = _Pool
        pooled, _ = pool.apply(input, *how)
    return pooled


class _Pool(torch.autograd.Function):
    """The greatest value of every window of ``[b, C, H, W]``, and where in ``[H W]`` it is."""

    @staticmethod
    def forward(x: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
        side_by_side = x.contiguous(memory_format=torch.channels_last)
        y, where = torch.ops.aten.max_pool2d_with_indices(side_by_side, *how)
        return y.contiguous(), where.contiguous()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, *ctx.how = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, output[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, where = ctx.saved_tensors
        g = gradients[0].contiguous()
        back = torch.ops.aten.max_pool2d_with_indices_backward
        return back(g, x, *ctx.how, where), None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, *how: Any) -> Any:
        x = x.movedim(in_dims[0], 0)
        y, where = _Pool.apply(x.flatten(0, 1), *how)  # type: ignore[no-untyped-call]
        return (y.unflatten(0, x.shape[:2]), where.unflatten(0, x.shape[:2])), (0, 0)
