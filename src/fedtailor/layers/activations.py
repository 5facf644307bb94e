"""The activation functions of torch, by name: their pieces, or that they are smooth.

This file imports only torch, since exported models take it along.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

Bound = float | Tensor | None


class Pieces(NamedTuple):
    """A piecewise-linear activation of up to three pieces.

    It is ``below`` up to ``low``, ``above`` from ``high`` on, and ``between`` elsewhere. Without a
    bound (None) there is no such piece.
    """

    low: Bound = None
    high: Bound = None
    below: Callable[[Tensor], Tensor | float] = lambda z: 0.0
    above: float | Tensor = 0.0
    between: Callable[[Tensor], Tensor] = lambda z: z

    def find(self, z: Tensor) -> tuple[Tensor, ...]:
        """Which piece each element of ``z`` is on: a bool tensor a bound."""
        low = () if self.low is None else (z > self.low,)
        return low if self.high is None else (*low, z >= self.high)

    def apply(self, z: Tensor, piece: tuple[Tensor, ...]) -> Tensor:
        """``z`` on these pieces, instead of those that it is on by itself."""
        h = self.between(z)
        if self.low is not None:
            h = torch.where(piece[0], h, self.below(z))
        return h if self.high is None else torch.where(piece[-1], self.above, h)


def clamp(min: Bound = None, max: Bound = None) -> Pieces:
    """The pieces of ``torch.clamp``."""
    low, high = (0.0 if bound is None else bound for bound in (min, max))
    return Pieces(min, max, lambda z: low, high)


def _leaky(slope: float) -> Pieces:
    return Pieces(0.0, below=lambda z: slope * z)


def _prelu(weight: Tensor) -> Pieces:
    return Pieces(0.0, below=lambda z: weight.view(-1, *[1] * (z.dim() - 2)) * z)


# The pieces of a torch function by its name, from the arguments after the first.
PIECEWISE: Mapping[str, Callable[..., Pieces]] = {
    "relu": lambda: clamp(0.0),
    "relu6": lambda: clamp(0.0, 6.0),
    "hardtanh": lambda min_val=-1.0, max_val=1.0: clamp(min_val, max_val),
    "clamp": clamp,
    "clip": clamp,
    "clamp_min": lambda min: clamp(min),
    "clamp_max": lambda max: clamp(None, max),
    "threshold": lambda threshold, value: Pieces(threshold, below=lambda z: value),
    "leaky_relu": lambda negative_slope=0.01: _leaky(negative_slope),
    "rrelu": lambda lower=1 / 8, upper=1 / 3, training=False: _leaky((lower + upper) / 2),
    "prelu": _prelu,
    "hardsigmoid": lambda: Pieces(-3.0, 3.0, above=1.0, between=lambda z: (z + 3.0) / 6.0),
    "abs": lambda: Pieces(0.0, below=lambda z: -z),
}

# The smooth activations that resemble ReLU, then all smooth ones.
RECTIFIERS = frozenset({"gelu", "silu", "mish", "elu", "selu", "celu", "softplus", "hardswish"})

SMOOTH = RECTIFIERS | {
    "sigmoid", "special_expit", "tanh", "log_sigmoid", "logsigmoid", "softsign", "tanhshrink",
}  # fmt: skip

POOLS = frozenset(f"{kind}max_pool{n}d" for kind in ("", "adaptive_") for n in (1, 2, 3))

# Functions that can't be replayed on another pattern: z_QK would choose its own piece. Sums,
# products, norms, softmax and pools may do so; max and min are pools unless they take two tensors.
UNGATED = frozenset({
    "exp", "exp2", "expm1", "log", "log1p", "log2", "log10", "logaddexp", "logit", "erf", "erfc",
    "special_erf", "special_erfc", "special_ndtr", "sin", "cos", "tan", "sinc", "sinh", "cosh",
    "asin", "acos", "atan", "arctan", "atan2", "asinh", "acosh", "atanh", "sign", "sgn", "floor",
    "ceil", "round", "trunc", "frac", "fmod", "remainder", "maximum", "minimum", "max", "min",
    "fmax", "fmin", "copysign",
    "heaviside", "gt", "ge", "lt", "le", "__gt__", "__ge__", "__lt__", "__le__", "hardshrink",
    "softshrink", "glu", "lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell", "gru_cell",
    "rnn_tanh_cell", "rnn_relu_cell",
})  # fmt: skip


def tangent(phi: Callable[[Tensor], Tensor], z: Tensor) -> tuple[Tensor, Tensor]:
    """phi(z) and phi'(z) of an elementwise function, each of the shape of ``z``."""
    value, pullback, *_ = torch.func.vjp(phi, z)
    return value, pullback(torch.ones_like(value))[0]


# The functions that write into their first argument, and the name of the same without that.
IN_PLACE = {f"{name}_": name for name in (*PIECEWISE, *SMOOTH)} | {"_threshold": "threshold"}
