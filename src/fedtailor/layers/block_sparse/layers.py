"""Linear layers and convolutions whose weight is gated block by block.

The blocks are consecutive parts of the weight's flat vector. Each is multiplied by its gate, or
dropped. If Python knows which blocks are kept, a row of the weight (an output feature or channel)
without a kept block is left out of the product or convolution, and so out of the gradients. Under
``torch.func.vmap``, where the clients of a chunk drop different blocks, the dense product gives the
same numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...task.surgery import replace
from .blocks import Blocks


def gated(tensor: Tensor, gates: Tensor, sizes: Sequence[int]) -> Tensor:
    """``tensor`` with each block of its flat vector multiplied by its gate.

    Args:
        tensor: any shape, of ``sum(sizes)`` values.
        gates: ``[B]``, one a block.
        sizes: the blocks' sizes, B integers.

    >>> gated(torch.ones(2, 2), torch.tensor([1.0, 5.0]), [1, 3])
    tensor([[1., 5.],
            [5., 5.]])
    """
    parts = torch.split(tensor.reshape(-1), list(sizes))
    scaled = [part * gate for part, gate in zip(parts, gates.unbind(), strict=True)]
    return torch.cat(scaled).view(tensor.shape)


@lru_cache(maxsize=4096)
def row_ranges(
    sizes: tuple[int, ...], kept: tuple[bool, ...], width: int
) -> tuple[tuple[int, int], ...]:
    """The rows that hold a kept block, as (first, last + 1), in order and apart; without any the
    first row, which gives the output its shape.

    >>> row_ranges((3, 3, 4, 2), (True, False, False, True), 2)
    ((0, 2), (5, 6))
    """
    ranges: list[tuple[int, int]] = []
    end = 0
    for size, keep in zip(sizes, kept, strict=True):
        start, end = end, end + size
        if not keep or not size:
            continue
        first, last = start // width, -(-end // width)
        if ranges and first <= ranges[-1][1]:
            first, _ = ranges.pop()
        ranges.append((first, last))
    return tuple(ranges) or ((0, 1),)


class Gated(nn.Module):
    """A layer with a gated weight; the bias is not gated.

    It is an ordinary layer unless a functional call replaces its tensors, as with those of
    `adapted`:

    - ``gates`` ``[B]`` and the whole weight: the layer gates the weight;
    - no gates and a vector as the weight: the gated values of the rows with a ``kept`` block.
    """

    weight: Any
    bias: Any
    gates: Tensor | None
    shape: tuple[int, ...]  # the whole weight's

    def __init__(self, base: Any, sizes: Sequence[int]) -> None:
        """Take over the settings and parameters of ``base``."""
        nn.Module.__init__(self)
        for name in base.__constants__:
            setattr(self, name, getattr(base, name))
        self.register_parameter("weight", base.weight)
        self.register_parameter("bias", base.bias)
        self.register_buffer("gates", None)
        self.kept, self.sizes = (True,) * len(sizes), tuple(sizes)
        self.shape = tuple(base.weight.shape)

    def whole_weight(self) -> Tensor:
        """The weight, gated where there are gates."""
        weight: Tensor = self.weight
        return weight if self.gates is None else gated(weight, self.gates, self.sizes)

    def over_rows(
        self, product: Callable[[Tensor, Tensor, Tensor | None], Tensor], x: Tensor
    ) -> Tensor:
        """``product`` of ``x`` with the weight and the bias; axis 1 of the result are the rows.

        Rows without a kept block are not computed: they are the bias alone.
        """
        rows, width = self.shape[0], math.prod(self.shape[1:])
        ranges = row_ranges(self.sizes, self.kept, width)
        weight, bias = self.weight.view(-1, *self.shape[1:]), self.bias
        if ranges == ((0, rows),):
            return product(x, weight, bias)
        y = product(x, weight, None if bias is None else torch.cat([bias[a:b] for a, b in ranges]))
        others = x.new_zeros(rows) if bias is None else bias
        others = others.to(y.dtype).view(-1, *[1] * (y.dim() - 2))
        columns, row = [], 0
        for (a, b), part in zip(ranges, torch.split(y, [b - a for a, b in ranges], 1), strict=True):
            columns += [others[row:a].expand(len(y), -1, *y.shape[2:]), part]
            row = b
        return torch.cat([*columns, others[row:].expand(len(y), -1, *y.shape[2:])], 1)


class GatedLinear(Gated, nn.Linear):
    """A linear layer with a gated weight."""

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dim() > 1:
            return F.linear(x, self.whole_weight(), self.bias)
        y = self.over_rows(F.linear, x.reshape(-1, self.in_features))
        return y.view(*x.shape[:-1], self.out_features)


class GatedConv2d(Gated, nn.Conv2d):
    """A convolution (one group, zeros as padding) with a gated weight."""

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dim() > 1:
            return self._convolve(x, self.whole_weight(), self.bias)
        return self.over_rows(self._convolve, x)

    def _convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.conv2d(x, weight, bias, self.stride, self.padding, self.dilation)


def gate_rows(model: nn.Module, blocks: Blocks) -> None:
    """Replace the layers of ``model`` that can leave rows out by gated ones, in place.

    These are plain nn.Linear, and nn.Conv2d with one group and a numeric padding of zeros. A layer
    whose weight other modules share stays as it is. So does a layer inside torch's own attention
    and transformer modules, which read its weight without calling it.
    """
    by_name = dict(zip(blocks.names, blocks.sizes, strict=True))
    sizes: dict[Tensor, tuple[int, ...]] = {p: by_name[n] for n, p in model.named_parameters()}
    inside: set[nn.Module] = set()
    uses: Counter[Tensor] = Counter()
    for _, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.MultiheadAttention | nn.TransformerEncoderLayer):
            inside.update(module.modules())
        uses.update(module.parameters(recurse=False))
    for path, module in list(model.named_modules()):
        if module in inside or not isinstance(module, nn.Linear | nn.Conv2d):
            continue
        if uses[module.weight] > 1:
            continue
        if type(module) is nn.Linear:
            replace(model, path, GatedLinear(module, sizes[module.weight]))
        elif type(module) is nn.Conv2d and _can_leave_rows_out(module):
            replace(model, path, GatedConv2d(module, sizes[module.weight]))


def _can_leave_rows_out(layer: nn.Conv2d) -> bool:
    numeric = not isinstance(layer.padding, str)
    return layer.groups == 1 and layer.padding_mode == "zeros" and numeric
