"""Linear layers and convolutions with a weight that is gated block by block; what a dropped block
would have cost is neither computed nor stored.

The blocks are pieces, of given sizes, of the weight's flat vector. Each is multiplied by its gate
or dropped. A row (an output feature or channel) without a kept block is left out of the matrix
product or convolution, and so out of their gradients. Where it is known in Python which blocks are
kept, a weight is given by their values alone, one block after the other. Under ``torch.func.vmap``,
where the clients of a chunk drop different blocks, the same numbers come from the dense product.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .blocks import Blocks
from .layers import replace
from .params import Params

# kept values of a weight from which on copying it costs more than many small products
_LARGE = 1 << 17


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


def spread(
    values: Tensor,
    gates: Tensor,
    sizes: tuple[int, ...],
    kept: tuple[bool, ...],
    spans: tuple[tuple[int, int], ...],
) -> Tensor:
    """`gated`, from the kept blocks' values alone, and only these spans of the flat vector.

    Args:
        values: the kept blocks, one after the other, a vector.
        gates: ``[B]``, one a block.
        sizes: the blocks' sizes, B integers.
        kept: which blocks are kept.
        spans: (start, end); no kept block may lie partly in one.

    >>> spread(torch.ones(3), torch.tensor([1.0, 5.0]), (1, 3), (False, True), ((0, 4),))
    tensor([0., 5., 5., 5.])
    """
    spreading: Any = _Spread
    result: Tensor = spreading.apply(values, gates, _contents(sizes, kept, spans))
    return result


class _Spread(torch.autograd.Function):
    """`spread`, each block at once: a model has hundreds of small ones. Not for torch.func."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, gates: Tensor, contents: _Contents) -> Tensor:
        ctx.save_for_backward(values, gates)
        ctx.contents = contents
        spread = values.new_zeros(contents.size)
        factors = gates.tolist()
        for block, here, there in contents.kept:
            torch.mul(values[here], factors[block], out=spread[there])
        return spread

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        values, gates = ctx.saved_tensors
        by_values, by_gates = torch.zeros_like(values), torch.zeros_like(gates)
        factors, gradient = gates.tolist(), gradient.contiguous()
        for block, here, there in ctx.contents.kept:
            torch.mul(gradient[there], factors[block], out=by_values[here])
            by_gates[block] = torch.dot(gradient[there], values[here])
        return by_values, by_gates, None


class _Contents(NamedTuple):
    """What lies in some spans: how many values, and of each kept block its number, where it is
    among the kept blocks' values, and where in the spans."""

    size: int
    kept: tuple[tuple[int, slice, slice], ...]


@lru_cache(maxsize=4096)
def _contents(
    sizes: tuple[int, ...], kept: tuple[bool, ...], spans: tuple[tuple[int, int], ...]
) -> _Contents:
    found: list[tuple[int, slice, slice]] = []
    ends, own = np.cumsum(sizes).tolist(), np.cumsum(np.where(kept, sizes, 0)).tolist()
    before = 0  # of the spans that are done
    for start, end in spans:
        for block, (size, last) in enumerate(zip(sizes, ends, strict=True)):
            if size and kept[block] and start <= last - size and last <= end:
                at = before + last - size - start
                here = slice(own[block] - size, own[block])
                found.append((block, here, slice(at, at + size)))
        before += end - start
    return _Contents(before, tuple(found))


class Piece(NamedTuple):
    """Consecutive values of one block in a weight ``[rows, width]``: either whole rows (so many) or
    a part of one (0)."""

    block: int
    kept: bool
    row: int
    rows: int
    size: int


@lru_cache(maxsize=4096)
def cut(sizes: tuple[int, ...], kept: tuple[bool, ...], width: int) -> tuple[Piece, ...]:
    """The pieces, in order, of a weight with rows of ``width`` values.

    >>> [(p.kept, p.rows, p.size) for p in cut((3, 5), (True, False), 2)]
    [(True, 1, 2), (True, 0, 1), (False, 0, 1), (False, 2, 4)]
    """
    pieces, start = [], 0
    for block, (total, keep) in enumerate(zip(sizes, kept, strict=True)):
        end = start + total
        while start < end:
            row, column = divmod(start, width)
            rows = 0 if column else (end - start) // width
            size = rows * width or min(width - column, end - start)
            pieces.append(Piece(block, keep, row, rows, size))
            start += size
    return tuple(pieces)


@lru_cache(maxsize=4096)
def row_ranges(
    sizes: tuple[int, ...], kept: tuple[bool, ...], width: int
) -> tuple[tuple[int, int], ...]:
    """The rows that hold a kept block, as (first, last + 1), in order and apart.

    >>> row_ranges((3, 3, 4, 2), (True, False, False, True), 2)
    ((0, 2), (5, 6))
    """
    ranges: list[tuple[int, int]] = []
    for piece in cut(sizes, kept, width):
        if not piece.kept:
            continue
        first, last = piece.row, piece.row + max(piece.rows, 1)
        if ranges and first <= ranges[-1][1]:
            first, _ = ranges.pop()
        ranges.append((first, last))
    return tuple(ranges)


class GatedLinear(nn.Linear):
    """A linear layer with a gated weight; the bias is used as it is.

    ``gates`` ``[B]`` is None, and the layer an ordinary one, unless a functional call gives it.
    Whoever does that says, too, which blocks are ``kept``, and gives their values alone as the
    weight; the others have gates of 0. None stands for blocks that aren't known in Python, because
    several clients are run at once; then the weight is whole.
    """

    gates: Tensor | None
    kept: tuple[bool, ...] | None
    sizes: tuple[int, ...]

    def __init__(self, base: nn.Linear, sizes: Sequence[int]) -> None:
        nn.Module.__init__(self)
        _take_over(self, base, sizes)

    def forward(self, x: Tensor) -> Tensor:
        if self.gates is None:
            return F.linear(x, self.weight, self.bias)
        if self.kept is None:
            return F.linear(x, gated(self.weight, self.gates, self.sizes), self.bias)
        rows = x.reshape(-1, self.in_features)
        if self.weight.numel() < _LARGE:
            y = _over_rows(self, F.linear, rows, (self.out_features, self.in_features))
        else:
            y = self._by_pieces(rows, self.gates.unbind(), self.kept)
        return y.view(*x.shape[:-1], self.out_features)

    def _by_pieces(self, x: Tensor, gates: Sequence[Tensor], kept: tuple[bool, ...]) -> Tensor:
        """``[n, width]`` to ``[n, rows]``, without a copy of the weight: whole rows of a block are
        gated after the product; only rows that several blocks share are put together."""
        pieces = cut(self.sizes, kept, self.in_features)
        values = iter(torch.split(self.weight, [piece.size for piece in pieces if piece.kept]))
        columns: list[Tensor] = []
        shared: list[Tensor] = []
        for piece in pieces:
            if piece.rows and piece.kept:
                product = F.linear(x, next(values).view(piece.rows, -1))
                columns.append(product * gates[piece.block])
            elif piece.rows:
                columns.append(x.new_zeros(len(x), piece.rows))
            else:
                part = next(values) * gates[piece.block] if piece.kept else None
                shared.append(x.new_zeros(piece.size) if part is None else part)
                if sum(map(len, shared)) == self.in_features:
                    columns.append(x @ torch.cat(shared)[:, None])
                    shared = []
        y = torch.cat([column.to(columns[0].dtype) for column in columns], 1)
        return y if self.bias is None else y + self.bias


class GatedConv2d(nn.Conv2d):
    """A convolution (one group, zeros as padding) with a gated weight, as `GatedLinear`."""

    gates: Tensor | None
    kept: tuple[bool, ...] | None
    sizes: tuple[int, ...]

    def __init__(self, base: nn.Conv2d, sizes: Sequence[int]) -> None:
        nn.Module.__init__(self)
        _take_over(self, base, sizes)

    def forward(self, x: Tensor) -> Tensor:
        if self.gates is None:
            return self._convolve(x, self.weight, self.bias)
        if self.kept is None:
            return self._convolve(x, gated(self.weight, self.gates, self.sizes), self.bias)
        shape = (self.out_channels, self.in_channels, *self.kernel_size)
        return _over_rows(self, self._convolve, x, shape)

    def _convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.conv2d(x, weight, bias, self.stride, self.padding, self.dilation)


Gated = GatedLinear | GatedConv2d


def _take_over(layer: Any, base: nn.Module, sizes: Sequence[int]) -> None:
    for name in layer.__constants__:
        setattr(layer, name, getattr(base, name))
    layer.register_parameter("weight", base.weight)
    layer.register_parameter("bias", base.bias)
    layer.register_buffer("gates", None)
    layer.kept, layer.sizes = None, tuple(sizes)


def _over_rows(
    layer: Gated,
    product: Callable[[Tensor, Tensor, Tensor | None], Tensor],
    x: Tensor,
    shape: tuple[int, ...],
) -> Tensor:
    """``product`` of ``x`` with the layer's weight, of ``shape`` if it were whole, and its bias,
    from the rows with a kept block; axis 1 are the rows. In the others the bias is all."""
    assert layer.gates is not None
    assert layer.kept is not None
    rows, width = shape[0], math.prod(shape[1:])
    # with no row at all one is taken along, for the output's shape
    taken = row_ranges(layer.sizes, layer.kept, width) or ((0, 1),)
    spans = tuple((a * width, b * width) for a, b in taken)
    flat = spread(layer.weight, layer.gates, layer.sizes, layer.kept, spans)
    weight, bias = flat.view(-1, *shape[1:]), layer.bias
    if taken == ((0, rows),):
        return product(x, weight, bias)
    y = product(x, weight, None if bias is None else torch.cat([bias[a:b] for a, b in taken]))
    others = x.new_zeros(rows) if bias is None else bias
    others = others.to(y.dtype).view(-1, *[1] * (y.dim() - 2))
    columns, row = [], 0
    for (a, b), part in zip(taken, torch.split(y, [b - a for a, b in taken], 1), strict=True):
        columns += [others[row:a].expand(len(y), -1, *y.shape[2:]), part]
        row = b
    return torch.cat([*columns, others[row:].expand(len(y), -1, *y.shape[2:])], 1)


def adapted(
    model: nn.Module, blocks: Blocks, state: Params, gates: Tensor, kept: tuple[bool, ...] | None
) -> Params:
    """The tensors by name that ``model`` uses when ``state``'s parameters are gated.

    Args:
        model: with layers from `gate_rows`, which are told what is kept.
        blocks: the parameters and how each is cut.
        state: the parameters, whole, or the kept blocks' values alone as from `Blocks.join`.
        gates: ``[L]``, 0 for dropped blocks.
        kept: bool ``[L]``; None where it isn't known in Python.
    """
    used = dict(state)
    for name, place, sizes in blocks.parts():
        path, _, leaf = name.rpartition(".")
        layer, value, size = model.get_submodule(path), state[name], sum(sizes)
        known = None if kept is None else kept[place]
        if known is not None and value.numel() == size:
            parts = torch.split(value.flatten(), list(sizes))
            chosen = [part for part, keep in zip(parts, known, strict=True) if keep]
            value = value.flatten() if all(known) else torch.cat([parts[0][:0], *chosen])
        if isinstance(layer, Gated) and leaf == "weight":
            layer.kept = known
            used |= {name: value, f"{path}.gates": gates[place]}
        elif known is None:
            used[name] = gated(value, gates[place], sizes)
        else:
            shape = model.get_parameter(name).shape
            used[name] = spread(value, gates[place], sizes, known, ((0, size),)).view(shape)
    return used


def gate_rows(model: nn.Module, blocks: Blocks) -> None:
    """Replace the layers of ``model`` that can leave rows out by gated ones, in place.

    These are plain nn.Linear and nn.Conv2d with one group and a numeric padding of zeros. Weights
    that several modules share stay as they are, and so do layers inside torch's own attention and
    transformer modules, which read them without calling them.
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
