"""Linear layers and convolutions with a weight that is gated block by block; what a dropped block
would have cost is neither computed nor stored.

The blocks are pieces, of given sizes, of the weight's flat vector. Each is multiplied by its gate
or dropped. A row (an output feature or channel) without a kept block is left out of the matrix
product or convolution, and so out of their gradients. That is where it is known in Python which
blocks are kept: their values alone are used, most of a model's as one vector. Under
``torch.func.vmap``, where the clients of a chunk drop different blocks, the same numbers come from
the dense product.
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


class Selection(NamedTuple):
    """Blocks of which it is known in Python that they are kept: bool ``[L]``, and how they are
    used.

    Those of most parameters are gated at once, as one vector: each of ``names`` then has so many
    values, in ``pieces`` of a block (its number) or of zeros (-1). A layer of ``alone``, with many
    values kept, gates its products.
    """

    kept: tuple[bool, ...]
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    pieces: tuple[tuple[int, int], ...]
    alone: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]  # blocks' numbers: of ``names``, then of each of ``alone``


def select(model: nn.Module, blocks: Blocks, kept: tuple[bool, ...]) -> Selection:
    """How `adapted` uses the kept blocks of ``model``, bool ``[L]``."""
    return _select(blocks, tuple(_width(model, name) for name in blocks.names), kept, _LARGE)


def _width(model: nn.Module, name: str) -> int:
    """The length of a gated layer's rows, negative for a linear one; 0 for other parameters."""
    path, _, leaf = name.rpartition(".")
    layer = model.get_submodule(path)
    if leaf != "weight" or not isinstance(layer, Gated):
        return 0
    return -layer.in_features if isinstance(layer, GatedLinear) else math.prod(layer.shape[1:])


@lru_cache(maxsize=64)
def _select(
    blocks: Blocks, widths: tuple[int, ...], kept: tuple[bool, ...], large: int
) -> Selection:
    names, lengths, alone = list[str](), list[int](), dict[str, tuple[int, ...]]()
    pieces: list[tuple[int, int]] = []
    for (name, place, sizes), width in zip(blocks.parts(), widths, strict=True):
        mine = kept[place]
        if width < 0 and np.dot(sizes, mine) >= large:
            alone[name] = tuple((np.flatnonzero(mine) + place.start).tolist())
            continue
        spans: tuple[tuple[int, int], ...] = ((0, sum(sizes)),)
        if width:
            rows = _taken(sizes, mine, abs(width))
            spans = tuple((a * abs(width), b * abs(width)) for a, b in rows)
        own = _pieces(sizes, mine, spans)
        names.append(name)
        lengths.append(sum(size for _, size in own))
        pieces += [(block + place.start if block >= 0 else -1, size) for block, size in own]
    together = tuple(block for block, _ in pieces if block >= 0)
    groups = (together, *alone.values())
    return Selection(kept, tuple(names), tuple(lengths), tuple(pieces), tuple(alone), groups)


def _pieces(
    sizes: Sequence[int], kept: Sequence[bool], spans: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """What lies in ``spans`` of a parameter's flat vector, in order: (block, or -1 for dropped
    ones; size). No kept block lies partly in one."""
    found: list[tuple[int, int]] = []
    for start, end in spans:
        done = start
        for block, last in enumerate(np.cumsum(sizes).tolist()):
            first = last - sizes[block]
            if sizes[block] and kept[block] and start <= first and last <= end:
                found += [(-1, first - done)] if first > done else []
                found.append((block, last - first))
                done = last
        found += [(-1, end - done)] if end > done else []
    return found


class _Spread(torch.autograd.Function):
    """From the kept blocks' values, one after the other, and the gates ``[L]`` to the gated values
    of each of a selection's ``names``. Each block at once: a model has hundreds of small ones. Not
    for torch.func."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, gates: Tensor, selection: Selection) -> Any:
        ctx.save_for_backward(values, gates)
        ctx.selection = selection
        size = sum(selection.sizes)
        spread = (values.new_empty if len(values) == size else values.new_zeros)(size)
        _multiply(_in_spread(spread, selection), _in_values(values, selection), gates, selection)
        return tuple(torch.split(spread, list(selection.sizes)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor, None]:
        values, gates = ctx.saved_tensors
        selection: Selection = ctx.selection
        by_values, by_gates = torch.empty_like(values), torch.zeros_like(gates)
        slopes = _in_spread(torch.cat(gradients), selection)
        _multiply(_in_values(by_values, selection), slopes, gates, selection)
        products = zip(slopes, _in_values(values, selection), strict=True)
        dots = [torch.dot(slope, value) for slope, value in products]
        if dots:
            by_gates[list(selection.groups[0])] = torch.stack(dots)
        return by_values, by_gates, None


def _in_spread(spread: Tensor, selection: Selection) -> list[Tensor]:
    """The kept blocks in a vector of all pieces."""
    parts = torch.split(spread, [size for _, size in selection.pieces])
    return [part for part, (block, _) in zip(parts, selection.pieces, strict=True) if block >= 0]


def _in_values(values: Tensor, selection: Selection) -> list[Tensor]:
    """The kept blocks in a vector of them alone."""
    sizes = [size for block, size in selection.pieces if block >= 0]
    return list(torch.split(values, sizes)) if sizes else []


def _multiply(out: list[Tensor], values: list[Tensor], gates: Tensor, selection: Selection) -> None:
    """Into ``out``: each kept block's values times its gate."""
    if out:
        factors = gates.tolist()
        torch._foreach_copy_(out, values)
        torch._foreach_mul_(out, [factors[number] for number in selection.groups[0]])


class GatedLinear(nn.Linear):
    """A linear layer with a gated weight; the bias is used as it is.

    It is an ordinary one unless a functional call gives it other tensors (`adapted` does). With
    ``gates`` ``[B]`` its weight is gated. A weight that is a vector is of the blocks that are
    ``kept`` alone: without ``gates`` it is the gated values of the rows that hold one; with them
    the blocks' values, one after the other.
    """

    gates: Tensor | None
    kept: tuple[bool, ...]
    sizes: tuple[int, ...]

    def __init__(self, base: nn.Linear, sizes: Sequence[int]) -> None:
        nn.Module.__init__(self)
        _take_over(self, base, sizes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole weight's."""
        return self.out_features, self.in_features

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dim() > 1:
            return F.linear(x, _whole(self), self.bias)
        rows = x.reshape(-1, self.in_features)
        if self.gates is None:
            y = _over_rows(self, F.linear, rows)
        else:
            y = self._by_pieces(rows, self.gates.unbind())
        return y.view(*x.shape[:-1], self.out_features)

    def _by_pieces(self, x: Tensor, gates: Sequence[Tensor]) -> Tensor:
        """``[n, width]`` to ``[n, rows]``, without a copy of the weight: whole rows of a block are
        gated after the product; only rows that several blocks share are put together."""
        pieces = cut(self.sizes, self.kept, self.in_features)
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
    """A convolution (one group, zeros as padding) with a gated weight, as `GatedLinear`; a vector
    is always of gated values."""

    gates: Tensor | None
    kept: tuple[bool, ...]
    sizes: tuple[int, ...]

    def __init__(self, base: nn.Conv2d, sizes: Sequence[int]) -> None:
        nn.Module.__init__(self)
        _take_over(self, base, sizes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole weight's."""
        return self.out_channels, self.in_channels, *self.kernel_size

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dim() > 1:
            return self._convolve(x, _whole(self), self.bias)
        return _over_rows(self, self._convolve, x)

    def _convolve(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.conv2d(x, weight, bias, self.stride, self.padding, self.dilation)


Gated = GatedLinear | GatedConv2d


def _take_over(layer: Any, base: nn.Module, sizes: Sequence[int]) -> None:
    for name in layer.__constants__:
        setattr(layer, name, getattr(base, name))
    layer.register_parameter("weight", base.weight)
    layer.register_parameter("bias", base.bias)
    layer.register_buffer("gates", None)
    layer.kept, layer.sizes = (True,) * len(sizes), tuple(sizes)


def _whole(layer: Gated) -> Tensor:
    if layer.gates is None:
        return layer.weight
    return gated(layer.weight, layer.gates, layer.sizes)


def _taken(
    sizes: tuple[int, ...], kept: tuple[bool, ...], width: int
) -> tuple[tuple[int, int], ...]:
    """`row_ranges`; with no row at all one is taken along, for the output's shape."""
    return row_ranges(sizes, kept, width) or ((0, 1),)


def _over_rows(
    layer: Gated, product: Callable[[Tensor, Tensor, Tensor | None], Tensor], x: Tensor
) -> Tensor:
    """``product`` of ``x`` with the layer's weight and its bias, from the rows with a kept block;
    axis 1 are the rows. In the others the bias is all."""
    rows, width = layer.shape[0], math.prod(layer.shape[1:])
    taken = _taken(layer.sizes, layer.kept, width)
    weight, bias = layer.weight.view(-1, *layer.shape[1:]), layer.bias
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
    model: nn.Module,
    blocks: Blocks,
    state: Params,
    gates: Tensor,
    selection: Selection | None,
    values: Sequence[Tensor] | None = None,
) -> Params:
    """The tensors by name that ``model`` uses when ``state``'s parameters are gated.

    Args:
        model: with layers from `gate_rows`, which are told what is kept.
        blocks: the parameters and how each is cut.
        state: the whole parameters, and anything else.
        gates: ``[L]``, 0 for dropped blocks.
        selection: what is kept, from `select`; None where it isn't known in Python.
        values: of each of the selection's groups, instead of those in ``state``.
    """
    used = dict(state)
    if selection is None:
        for name, place, sizes in blocks.parts():
            path, _, leaf = name.rpartition(".")
            if leaf == "weight" and isinstance(model.get_submodule(path), Gated):
                used[_gates_of(name)] = gates[place]
            else:
                used[name] = gated(state[name], gates[place], sizes)
        return used
    if values is None:
        values = [blocks.join(group, state, {}) for group in selection.groups]
    spreading: Any = _Spread
    together = spreading.apply(values[0], gates, selection)
    used |= dict(zip((*selection.names, *selection.alone), (*together, *values[1:]), strict=True))
    for name, place, _ in blocks.parts():
        path, _, leaf = name.rpartition(".")
        layer = model.get_submodule(path)
        if leaf != "weight" or not isinstance(layer, Gated):
            used[name] = used[name].view(state[name].shape)
            continue
        layer.kept = selection.kept[place]
        if name in selection.alone:
            used[_gates_of(name)] = gates[place]
    return used


def _gates_of(weight: str) -> str:
    return f"{weight.removesuffix('weight')}gates"


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
