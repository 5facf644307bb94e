"""Frozen linear layers with weights of 4 or 8 bits, from which each product is computed anew.

The weights are cut into blocks of 64, each with a scale of its own. ``int8`` has whole numbers from
-127 to 127 in a block. ``nf4`` has one of 16 numbers, quantiles of the normal distribution (QLoRA:
Efficient Finetuning of Quantized LLMs. T. Dettmers, A. Pagnoni, A. Holtzman, L. Zettlemoyer.
NeurIPS 2023, appendix E). Neither pass keeps the weights as numbers for the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import InputError
from ..params import constant
from .surgery import replace

Form = Literal["nf4", "int8"]

_BLOCK = 64
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip


def quantise(values: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """Return the codes of all values, int8 ``[n]`` or two of 4 bits in uint8 ``[n / 2]``, padded to
    whole blocks, and the scale of each block, float32.

    >>> codes, scales = quantise(torch.tensor([0.5, -2.0, 0.0]), "int8")
    >>> codes[:3].tolist(), scales.tolist()
    ([32, -127, 0], [2.0])
    """
    flat = values.detach().float().flatten()
    blocks = F.pad(flat, (0, -len(flat) % _BLOCK)).view(-1, _BLOCK)
    scales = blocks.abs().amax(1)
    of_one = blocks / scales.clamp(min=1e-38)[:, None]
    if form == "int8":
        return (127 * of_one).round().to(torch.int8).flatten(), scales
    levels = constant(_NF4, flat.dtype, flat.device)
    codes = torch.bucketize(of_one, (levels[1:] + levels[:-1]) / 2).to(torch.uint8).view(-1, 2)
    return codes[:, 0] << 4 | codes[:, 1], scales


def dequantise(codes: Tensor, scales: Tensor, form: Form, dtype: torch.dtype) -> Tensor:
    """Return the values of `quantise`'s codes, with the padding."""
    if form == "int8":
        blocks = codes.view(-1, _BLOCK).to(dtype) * (scales / 127).to(dtype)[:, None]
        return blocks.flatten()
    levels = constant(_NF4, dtype, codes.device)
    pairs = torch.stack((levels.repeat_interleave(16), levels.repeat(16)), 1)  # of each byte
    return (pairs[codes.int()].view(-1, _BLOCK) * scales.to(dtype)[:, None]).flatten()


class QuantisedLinear(nn.Linear):
    """An nn.Linear that is never trained. Its ``weight`` is worked out each time."""

    def __init__(self, linear: nn.Linear, form: Form) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.form: Form = form
        codes, scales = quantise(linear.weight, form)
        self.register_buffer("codes", codes)
        self.scales = nn.Parameter(scales, requires_grad=False)  # shows if they were to be trained
        self.register_parameter("bias", linear.bias)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weights ``[d_out, d_in]``, float32; a new tensor."""
        codes, shape = self.get_buffer("codes"), (self.out_features, self.in_features)
        return _matrix(codes, self.scales, self.form, shape, torch.float32)

    def forward(self, input: Tensor) -> Tensor:
        """``[..., d_in]`` -> ``[..., d_out]``."""
        kind = input.device.type
        to = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        shape = self.out_features, self.in_features
        apply: Any = _Product.apply
        output: Tensor = apply(input.to(to), self.codes, self.scales, self.form, shape, False)
        return output if self.bias is None else output + self.bias.to(to)


def _matrix(
    codes: Tensor, scales: Tensor, form: Form, shape: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    return dequantise(codes, scales, form, dtype)[: shape[0] * shape[1]].view(shape)


class _Product(torch.autograd.Function):
    """(x, codes, scales, form, (d_out, d_in), turned) -> x W^T; turned: x W."""

    @staticmethod
    def forward(
        x: Tensor, codes: Tensor, scales: Tensor, form: Form, shape: Any, turned: bool
    ) -> Tensor:
        W = _matrix(codes, scales, form, shape, x.dtype)
        return x @ W if turned else F.linear(x, W)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, codes, scales, ctx.form, ctx.shape, ctx.turned = inputs
        ctx.save_for_backward(codes, scales)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        apply: Any = _Product.apply
        of_x = apply(gradient, *ctx.saved_tensors, ctx.form, ctx.shape, not ctx.turned)
        return of_x, None, None, None, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, *others: Any) -> Any:
        apply: Any = _Product.apply
        return apply(x.movedim(dims[0], 0), *others), 0


def quantise_layers(model: nn.Module, paths: Iterable[str], form: Form) -> None:
    """Replace the linear layers at ``paths`` of ``model``, one after the other, in place."""
    for path in paths:
        linear = model.get_submodule(path)
        assert isinstance(linear, nn.Linear)
        replace(model, path, QuantisedLinear(linear, form))


def quantised(model: nn.Module) -> dict[str, QuantisedLinear]:
    """The layers of `quantise_layers`, by path."""
    return {p: one for p, one in model.named_modules() if isinstance(one, QuantisedLinear)}


def num_parameters(model: nn.Module) -> int:
    """Count the parameters, the weights of quantised layers as what they stand for."""
    layers = quantised(model).values()
    more = sum(one.out_features * one.in_features - one.scales.numel() for one in layers)
    return more + sum(value.numel() for value in model.parameters())


def check_frozen(before: nn.Module, adapted: nn.Module) -> None:
    """Raise InputError where a method trains the weights of quantised layers of ``before``, or
    replaces the layers, in the model as it has ``adapted`` it."""
    layers, kept = quantised(before), quantised(adapted)
    trained = [path for path, one in kept.items() if one.scales.requires_grad]
    if trained or len(kept) < len(layers):
        form = next(iter(layers.values())).form
        raise InputError(
            f"model.quantise = {form!r}: the method trains or replaces weights that are quantised, "
            f"{(trained or list(layers))[0]}.weight among others; train adapters (trainable = "
            "'lora'), or leave model.quantise out"
        )
