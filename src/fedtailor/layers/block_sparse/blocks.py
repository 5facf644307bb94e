"""How parameters are cut into blocks, and how blocks' values are read and written (pFedGate)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...params import Params
from ...stacked import weighted_sums


def block_sizes(numel: int, blocks: int, min_sparsity: float) -> list[int]:
    """How a flat parameter is cut (pFedGate, section 5.2.2): a first block, then equal ones.

    Args:
        numel: the parameter's size d_l.
        blocks: B, at least 2.
        min_sparsity: the first block's share, rounded down.

    Returns:
        B sizes that add up to ``numel``; the last may be smaller, and small parameters have empty
        blocks.

    >>> block_sizes(100, 5, 0.1)
    [10, 23, 23, 23, 21]
    """
    first = math.floor(numel * min_sparsity)
    size = -(-(numel - first) // (blocks - 1))
    ends = [min(numel, first + size * number) for number in range(blocks)]
    return [first, *(b - a for a, b in pairwise(ends))]


@dataclass(frozen=True)
class Blocks:
    """The blocks of several parameters: the parameters' names, and for each its blocks' sizes.

    Blocks are numbered over all parameters, in this order; L is their number.
    """

    names: tuple[str, ...]
    sizes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, model: nn.Module, blocks: int, min_sparsity: float) -> Blocks:
        """Every parameter of ``model`` cut by `block_sizes`."""
        sizes = {
            name: tuple(block_sizes(parameter.numel(), blocks, min_sparsity))
            for name, parameter in model.named_parameters()
        }
        return cls(tuple(sizes), tuple(sizes.values()))

    @cached_property
    def W(self) -> NDArray[np.int64]:  # noqa: N802
        """The blocks' sizes, ``[L]``."""
        return np.concatenate([np.array(sizes, dtype=np.int64) for sizes in self.sizes])

    @cached_property
    def always(self) -> NDArray[np.bool_]:
        """The first block of each parameter, bool ``[L]``."""
        return np.concatenate([np.arange(len(sizes)) == 0 for sizes in self.sizes])

    @cached_property
    def d(self) -> int:
        """How many parameters there are."""
        return int(self.W.sum())

    def capacity(self, share: float) -> int:
        """How many parameters a share of d holds, rounded down.

        >>> Blocks(("a",), ((60, 40),)).capacity(0.29)
        29
        """
        return math.floor(share * self.d + 1e-6)  # 0.29 * 100 is 28.999999999999996 in floats

    def parts(self) -> Iterator[tuple[str, slice, tuple[int, ...]]]:
        """(name, its place among the L blocks, its blocks' sizes) of every parameter."""
        start = 0
        for name, sizes in zip(self.names, self.sizes, strict=True):
            yield name, slice(start, start + len(sizes)), sizes
            start += len(sizes)

    @cached_property
    def places(self) -> tuple[tuple[str, slice], ...]:
        """The place of each of the L blocks: a parameter's name, and a slice of its flat vector."""
        places = []
        for name, sizes in zip(self.names, self.sizes, strict=True):
            ends = np.cumsum(sizes).tolist()
            slices = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
            places += [(name, place) for place in slices]
        return tuple(places)

    def join(self, numbers: Sequence[int], state: Params, moved: Mapping[int, Tensor]) -> Tensor:
        """The values of these blocks, one after the other.

        They come from ``moved``, by the block's number, or else from ``state``.
        """
        flat = {name: state[name].flatten() for name in self.names}
        parts = [flat[self.names[0]][:0]]
        for number in numbers:
            name, place = self.places[number]
            parts.append(moved[number] if number in moved else flat[name][place])
        return torch.cat(parts)

    def split(self, numbers: Sequence[int], values: Tensor) -> dict[int, Tensor]:
        """The inverse of `join`, by the block's number: views of ``values``."""
        if not numbers:
            return {}
        parts = torch.split(values, self.W[list(numbers)].tolist())
        return dict(zip(numbers, parts, strict=True))

    def whole(self, state: Params, moved: Mapping[int, Tensor]) -> Params:
        """Copies of ``state``'s parameters, with the blocks of ``moved`` written into them."""
        copies = {n: state[n].clone(memory_format=torch.contiguous_format) for n in self.names}
        for number, values in moved.items():
            name, place = self.places[number]
            copies[name].view(-1)[place] = values
        return copies

    def weighted_sum(self, stacked: Params, weights: Tensor) -> Params:
        """``sum_c weights[c, b] * stacked[c]`` in every block b.

        ``stacked`` holds the parameters ``[c, ...]``, ``weights`` is ``[c, L]``.
        """
        sums = {n: stacked[n].new_zeros(stacked[n].shape[1:]) for n in self.names}
        for number, (name, place) in enumerate(self.places):
            part = stacked[name].flatten(1)[:, place]
            sums[name].view(-1)[place] = weighted_sums(part, weights[:, number])
        return sums
