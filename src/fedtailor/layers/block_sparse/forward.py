"""The tensors that a model uses in a forward pass with gated blocks (pFedGate).

If Python knows which blocks are kept, only their values are used, as one vector. Under
``torch.func.vmap`` Python doesn't know: gated layers get their whole weights, and gates that are 0
for dropped blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ...params import Params
from ...torch_private import in_each
from .blocks import Blocks
from .layers import Gated, gated, row_ranges


class Selection(NamedTuple):
    """Which blocks are kept, bool ``[L]``, and the vector of all values that a forward pass uses:
    the kept blocks of the computed rows, and zeros between them."""

    kept: tuple[bool, ...]
    numbers: tuple[int, ...]  # of the kept blocks, as they stand in the vector
    sizes: tuple[int, ...]  # how many values of the vector each parameter has
    pieces: tuple[tuple[bool, int], ...]  # of the vector: whether it is a block or zeros; size


def select(model: nn.Module, blocks: Blocks, kept: tuple[bool, ...]) -> Selection:
    """How `adapted` uses the kept blocks of ``model``, bool ``[L]``."""
    layers = [_gated_layer(model, name) for name in blocks.names]
    widths = tuple(0 if layer is None else math.prod(layer.shape[1:]) for layer in layers)
    return _select(blocks, widths, kept)


def _gated_layer(model: nn.Module, name: str) -> Gated | None:
    """The gated layer whose weight has this name; None: there is none."""
    path, _, leaf = name.rpartition(".")
    layer = model.get_submodule(path)
    return layer if leaf == "weight" and isinstance(layer, Gated) else None


@lru_cache(maxsize=64)
def _select(blocks: Blocks, widths: tuple[int, ...], kept: tuple[bool, ...]) -> Selection:
    """``widths``: the lengths of gated layers' rows, 0 for other parameters."""
    numbers, lengths, pieces = list[int](), list[int](), list[tuple[bool, int]]()
    for (_, place, sizes), width in zip(blocks.parts(), widths, strict=True):
        kept_here = kept[place]
        rows = row_ranges(sizes, kept_here, width) if width else ()
        spans = [(a * width, b * width) for a, b in rows] or [(0, sum(sizes))]
        own = _pieces(sizes, kept_here, spans)
        lengths.append(sum(size for _, size in own))
        pieces += [(block >= 0, size) for block, size in own]
        numbers += [block + place.start for block, _ in own if block >= 0]
    return Selection(kept, tuple(numbers), tuple(lengths), tuple(pieces))


def _pieces(
    sizes: Sequence[int], kept: Sequence[bool], spans: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """The pieces of ``spans`` of a parameter's flat vector, in order: a kept block's number, or -1
    for dropped values; size. A kept block lies in one span or in none."""
    pieces: list[tuple[int, int]] = []
    for start, end in spans:
        done = start
        for block, last in enumerate(np.cumsum(sizes).tolist()):
            first = last - sizes[block]
            if sizes[block] and kept[block] and start <= first and last <= end:
                pieces += [(-1, first - done)] if first > done else []
                pieces.append((block, last - first))
                done = last
        pieces += [(-1, end - done)] if end > done else []
    return pieces


class _Spread(torch.autograd.Function):
    """From the kept blocks' values, one after the other, and the gates ``[L]`` to the gated values
    of each parameter.

    One call does all blocks, since a model has hundreds of small ones. Not for torch.func.
    """

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
            by_gates[list(selection.numbers)] = torch.stack(dots)
        return by_values, by_gates, None


def _in_spread(spread: Tensor, selection: Selection) -> list[Tensor]:
    """The kept blocks' parts of a vector of all pieces."""
    parts = torch.split(spread, [size for _, size in selection.pieces])
    return [part for part, (is_kept, _) in zip(parts, selection.pieces, strict=True) if is_kept]


def _in_values(values: Tensor, selection: Selection) -> list[Tensor]:
    """The kept blocks' parts of a vector that holds nothing else."""
    sizes = [size for is_kept, size in selection.pieces if is_kept]
    return list(torch.split(values, sizes)) if sizes else []


def _multiply(out: list[Tensor], values: list[Tensor], gates: Tensor, selection: Selection) -> None:
    """Write each kept block's values times its gate into ``out``."""
    if out:
        factors = gates.tolist()
        in_each("copy", out, values)
        in_each("mul", out, [factors[number] for number in selection.numbers])


def adapted(
    model: nn.Module,
    blocks: Blocks,
    state: Params,
    gates: Tensor,
    selection: Selection | None,
    values: Tensor | None = None,
) -> Params:
    """The tensors by name that ``model`` uses when ``state``'s parameters are gated.

    Args:
        model: its layers from `gate_rows` are told which blocks are kept.
        blocks: the parameters and how each is cut.
        state: the whole parameters and any other tensors.
        gates: ``[L]``, 0 for dropped blocks.
        selection: which blocks are kept, from `select`; None: Python doesn't know.
        values: the kept blocks' values, as the selection has them; None: those in ``state``.
    """
    used = dict(state)
    if selection is None:
        for name, place, sizes in blocks.parts():
            if _gated_layer(model, name) is None:
                used[name] = gated(state[name], gates[place], sizes)
            else:
                used[f"{name.removesuffix('weight')}gates"] = gates[place]
        return used
    if values is None:
        values = blocks.join(selection.numbers, state, {})
    spreading: Any = _Spread
    together = spreading.apply(values, gates, selection)
    for (name, place, _), value in zip(blocks.parts(), together, strict=True):
        layer = _gated_layer(model, name)
        if layer is not None:
            layer.kept = selection.kept[place]
        used[name] = value.view(state[name].shape) if layer is None else value
    return used
