"""Max pooling, and convolutions before it, in the layout in which they are fast on a CPU.

PyTorch's max pooling takes a picture value by value if the values of a channel lie side by side in
memory, and eight or sixteen channels at once if the values of a position do (``channels_last``).
Its convolutions are as fast or faster with the second layout. The output of a pool, a quarter of
the size or less, is contiguous again, for any code that comes after it.

Where clients run at once, and under a ``TorchFunctionMode``, which must see a model's own
functions, nothing is changed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.overrides import has_torch_function

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
    """`nn.MaxPool2d`, with the same bits in values and gradients."""

    def forward(self, input: Tensor) -> Tensor:
        pooled: Tensor = super().forward(_channels_last(input))
        return pooled.contiguous() if input.device.type == "cpu" else pooled


def _prepare_chain(chain: nn.Module) -> None:
    modules = list(chain.children())
    for index, pool in enumerate(modules):
        if not isinstance(pool, FastMaxPool2d):
            continue
        for earlier in reversed(modules[:index]):
            if isinstance(earlier, nn.Conv2d):
                earlier.register_forward_pre_hook(_lay_out)
            elif not isinstance(earlier, nn.ReLU):
                break


def _lay_out(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(map(_channels_last, inputs))  # none if the caller passes it by keyword


def _channels_last(x: Tensor) -> Tensor:
    """``[b, C, H, W]`` in that layout, or ``x`` itself."""
    if x.dim() != 4 or x.device.type != "cpu" or has_torch_function((x,)):
        return x
    batch, channels, height, width = x.shape
    try:
        if channels > 1:
            return x.contiguous(memory_format=torch.channels_last)
        # one channel has both layouts; the strides say which
        return x.contiguous().view(batch, height, width, 1).movedim(3, 1)
    except RuntimeError:  # under torch.func.vmap, which has no such layout
        return x
