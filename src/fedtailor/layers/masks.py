"""Masks: the elements of largest score, and masks as bits, eight elements in a byte."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from ..torch_private import view_words


def drop_least(scores: Tensor, share: float | Tensor) -> Tensor:
    """All but the floor(share n) elements of least score; of equal elements the first are dropped.

    Args:
        scores: ``[n]``.
        share: from 0 to below 1, a number or a float64 scalar.

    Returns:
        bool ``[n]``.

    >>> drop_least(torch.tensor([3.0, 1.0, 1.0, 2.0]), 0.25).tolist()
    [True, False, True, True]
    """
    position = scores.argsort(stable=True).argsort()
    share = scores.new_ones((), dtype=torch.float64) * share
    # 0.29 * 100 is 28.999999999999996 in floating point, and 29 elements
    return position >= torch.floor(share * scores.shape[-1] + 1e-6)


def pack_bits(mask: Tensor) -> Tensor:
    """A mask, bool ``[..., n]``, as bits: uint8 ``[..., n / 8]``, rounded up.

    The first element is the lowest bit of the first byte.

    >>> pack_bits(torch.tensor([True, False, True]))
    tensor([5], dtype=torch.uint8)
    """
    padded = F.pad(mask, [0, -mask.shape[-1] % 8])
    places = torch.arange(8, dtype=torch.uint8, device=mask.device)
    bits: Tensor = padded.byte().view(*padded.shape[:-1], padded.shape[-1] // 8, 8) << places
    return bits.sum(-1).byte()


def unpack_bits(bits: Tensor, size: int) -> Tensor:
    """The inverse of `pack_bits`: the first ``size`` elements of the last axis.

    >>> unpack_bits(torch.tensor([5], dtype=torch.uint8), 3)
    tensor([ True, False,  True])
    """
    words = _eight_bools(bits.device)[bits.int()]
    return view_words(words, torch.bool)[..., :size]


@cache
def _eight_bools(device: torch.device) -> Tensor:
    """The bits of each byte as a word of eight bytes, int64 ``[256]``."""
    bits = (torch.arange(256)[:, None] >> torch.arange(8) & 1).bool()
    return bits.view(torch.int64)[:, 0].to(device)
