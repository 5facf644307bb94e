"""Random numbers keyed by their purpose, never by the order of calls.

A key is an int64 scalar tensor, so it can be batched: under ``torch.func.vmap`` every client draws
the same numbers as when it runs alone. The generator is SplitMix64 (Steele, Lea and
Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) over a counter.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .torch_private import view_words

_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB


def _seed_words(*parts: int | str) -> bytes:
    return hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=32).digest()


def key(*parts: int | str) -> Tensor:
    """Return the key of (seed, round, client, purpose) or any other parts: int64 scalar tensor.

    >>> key(0, 3, 7, "local").equal(key(0, 3, 7, "local"))
    True
    """
    return torch.tensor(int.from_bytes(_seed_words(*parts)[:8], "little", signed=True))


def generator(*parts: int | str) -> np.random.Generator:
    """Return a NumPy generator for the same kind of parts, for shuffles and draws of indices.

    >>> bool(generator(0, "cohort").integers(9) == generator(0, "cohort").integers(9))
    True
    """
    return np.random.default_rng(np.frombuffer(_seed_words(*parts), dtype=np.uint32))


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift int64 to the right logically (torch's shift is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def fold_in(k: Tensor, data: int | Tensor) -> Tensor:
    """Return a new key from ``k`` and an integer (a step, a layer)."""
    if isinstance(data, int):  # as a number, which a GPU need not wait for, within int64
        return _mix(k + (((data + 1) * _GAMMA + 2**63) % 2**64 - 2**63))
    return _mix(k + (torch.as_tensor(data, device=k.device) + 1) * _GAMMA)


def uniform(k: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw numbers from [0, 1), of ``shape``, in steps of 2^-24, or 2^-53 for float64.

    >>> bool((uniform(key(0), (1000,)).mean() - 0.5).abs() < 0.05)
    True
    """
    counter = torch.arange(math.prod(shape), device=k.device).view(shape)
    bits = 53 if dtype == torch.float64 else 24
    return _shift(_mix(k + (counter + 1) * _GAMMA), 64 - bits).to(dtype) * 2.0**-bits


def bernoulli(k: Tensor, shape: Sequence[int], p: float, first: int = 0) -> Tensor:
    """Draw bools of ``shape``, True with probability ``p`` (to 2^-16).

    An axis has at most 65,536 positions. The draw at a position does not depend on ``shape``. Four
    neighbours share one 64-bit word. Of several axes, the first begins at position ``first``.

    >>> bool((bernoulli(key(0), (1000,), 0.9).float().mean() - 0.9).abs() < 0.05)
    True
    """
    row = torch.zeros((), dtype=torch.int64, device=k.device)
    for size in shape[:-1]:
        row = row[..., None] * 65536 + torch.arange(first, first + size, device=k.device)
        first = 0
    word = torch.arange(1, -(-shape[-1] // 4) + 1, device=k.device) * _GAMMA
    x = fold_in(k, row)[..., None] + word
    for bits, factor in ((30, _MIX1), (27, _MIX2)):  # `_mix` in place: no new memory
        x.bitwise_xor_(_shift(x, bits)).mul_(factor)
    x.bitwise_xor_(_shift(x, 31))
    return view_words(x, torch.int16)[..., : shape[-1]] < min(round(p * 65536), 65535) - 32768


def normal(
    k: Tensor, shape: tuple[int, ...], std: float = 1.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Draw numbers from N(0, std^2), of ``shape``, by Box and Muller's transform.

    >>> bool((normal(key(0), (4000,)).std() - 1).abs() < 0.05)
    True
    """
    radius = torch.sqrt(-2.0 * torch.log1p(-uniform(fold_in(k, 0), shape, dtype)))
    return std * radius * torch.cos(2.0 * math.pi * uniform(fold_in(k, 1), shape, dtype))
