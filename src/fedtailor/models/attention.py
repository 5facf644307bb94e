"""Attention by PyTorch's fused kernels, which torch.func.vmap can follow.

PyTorch's scaled_dot_product_attention has no rule for vmap: there it runs one client after the
other. `attention` folds the clients into the batch, forward and backward, and keeps no weights
``[b, heads, L, L]``.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NAME = "fedtailor"  # among transformers' attention functions
_OTHERS = ("position_bias", "softcap", "s_aux", "sinks")  # what some models add to the formula

_Form = tuple[float, bool]  # the scaling; whether a token sees itself and earlier ones alone
_Saved = tuple[Tensor, ...]  # the output [b, heads, L, d], and what the backward pass needs of it


def give(model: Any) -> None:
    """Let a model of transformers use `attention`, with masks of float, where its code allows."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    if "ALL_ATTENTION_FUNCTIONS" in vars(sys.modules[type(model).__module__]):
        AttentionInterface.register(NAME, attention)
        AttentionMaskInterface.register(NAME, eager_mask)
        model.set_attn_implementation(NAME)


def is_used(model: nn.Module) -> bool:
    """Say whether `attention` is that of a model of transformers."""
    configs = [vars(module).get("config") for module in model.modules()]
    return any(getattr(config, "_attn_implementation", None) == NAME for config in configs)


def causal_mask(like: Tensor) -> Tensor:
    """The mask ``[1, 1, 1, 1]`` that tells `attention` to let a token see itself and all before:
    the kernels know that by themselves, and faster than by a mask of all pairs."""
    return like.new_zeros(1, 1, 1, 1, dtype=torch.float32)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute ``softmax(Q K^T scaling + mask) V`` ``[b, L, heads, d]``, as transformers calls it,
    and None for the weights.

    Q is ``[b, heads, L, d]``, K and V are ``[b, groups, S, d]``: several heads share one of the
    groups. The mask is float ``[b or 1, heads or 1, L, S]``, or `causal_mask`; None: all is
    visible. Without ``scaling`` it is ``d ** -0.5``; ``dropout`` is always 0 here. The layer
    ``module`` computes its own formula if ``kwargs`` have more terms.
    """
    if any(kwargs.get(name) is not None for name in _OTHERS):
        own = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
        result: tuple[Tensor, None] = own(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
        return result
    query, key = query.to(value.dtype), key.to(value.dtype)  # rotations are in float32
    heads = query.shape[1] // key.shape[1]
    if heads > 1:
        key, value = (x.repeat_interleave(heads, 1) for x in (key, value))
    length = key.shape[-2]
    causal = attention_mask is not None and attention_mask.shape[-1] < length
    if causal:
        attention_mask = None
    if attention_mask is not None:
        attention_mask = attention_mask[..., :length].to(value.dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    function: Any = _Attention
    output: Tensor = function.apply(query, key, value, attention_mask, (scale, causal))[0]
    return output.transpose(1, 2).contiguous(), None


def _plain(form: _Form, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scale, causal = form
    weights = q @ k.transpose(-1, -2) * scale
    if causal:
        later = torch.ones_like(weights[..., :1, :1]).expand_as(weights).triu(1)
        weights = weights.masked_fill(later.bool(), -torch.inf)
    if mask is not None:
        weights = weights + mask
    return weights.softmax(-1, dtype=torch.promote_types(v.dtype, torch.float32)).to(v.dtype) @ v


def _aligned(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask with rows that start at multiples of 16 numbers, as the kernels for CUDA need it."""
    if mask is None:
        return None
    length = k.shape[-2]
    padded = F.pad(mask, (0, -length % 16))[..., :length]
    return padded.expand(*q.shape[:-1], length)


class _Attention(torch.autograd.Function):
    """(q, k, v, mask, form) -> the output, and the logarithms of the sums of the weights, which the
    backward pass needs."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, form: _Form) -> _Saved:
        kernels, (scale, causal) = torch.ops.aten, form
        if q.is_cuda:
            saved = kernels._scaled_dot_product_efficient_attention(
                q, k, v, _aligned(mask, q, k), True, is_causal=causal, scale=scale
            )[:2]
        else:
            saved = kernels._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, is_causal=causal, attn_mask=mask, scale=scale
            )
        return tuple(saved)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        *tensors, ctx.form = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.mark_non_differentiable(*output[1:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> Any:
        q, k, v, mask, *saved = ctx.saved_tensors
        if ctx.needs_input_grad[3]:  # a learned bias
            plain = partial(_plain, ctx.form)
            return *torch.func.vjp(plain, q, k, v, mask)[1](gradient), None
        function: Any = _Backward
        return *function.apply(gradient, q, k, v, mask, ctx.form, *saved), None, None

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> Any:
        return _folded(_Attention, info.batch_size, dims, inputs, mask=3)


class _Backward(torch.autograd.Function):
    """(gradient, q, k, v, mask, form, *saved) -> the gradients with respect to q, k and v."""

    @staticmethod
    def forward(
        gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, form: _Form,
        *saved: Tensor,
    ) -> _Saved:  # fmt: skip
        kernels, (scale, causal) = torch.ops.aten, form
        if q.is_cuda:
            seeds = torch.zeros(2, dtype=torch.int64, device=q.device)  # of dropout, which is 0
            gradients = kernels._scaled_dot_product_efficient_attention_backward(
                gradient, q, k, v, _aligned(mask, q, k), *saved, *seeds, 0.0, [True] * 3 + [False],
                causal, scale=scale,
            )[:3]  # fmt: skip
        else:
            gradients = kernels._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient, q, k, v, *saved, 0.0, causal, attn_mask=mask, scale=scale
            )
        return tuple(gradients)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.form = inputs[5]
        ctx.save_for_backward(*inputs[:5])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """The second derivatives, in plain arithmetic."""
        gradient, q, k, v, mask = ctx.saved_tensors

        def first(gradient: Tensor, *qkv: Tensor) -> Any:
            plain = partial(_plain, ctx.form, mask=mask)
            return torch.func.vjp(plain, *qkv)[1](gradient)

        second = torch.func.vjp(first, gradient, q, k, v)[1]
        return *second(gradients), *[None] * (len(ctx.needs_input_grad) - 4)

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> Any:
        return _folded(_Backward, info.batch_size, dims, inputs, mask=4)


def _folded(function: Any, n: int, dims: Any, inputs: Any, mask: int) -> Any:
    """Apply ``function`` to the inputs of n clients as one batch; number ``mask`` of the inputs may
    be one for a client's whole batch."""
    first = next(i for i, x in enumerate(inputs) if isinstance(x, Tensor) and i != mask)
    b = inputs[first].shape[0 if dims[first] is None else int(dims[first] == 0)]
    folded = []
    for i, (x, dim) in enumerate(zip(inputs, dims, strict=True)):
        if isinstance(x, Tensor):
            x = x.expand(n, *x.shape) if dim is None else x.movedim(dim, 0)
            if i == mask:
                x = x.expand(n, b, *x.shape[2:])
            x = x.reshape(-1, *x.shape[2:])
        folded.append(x)
    outputs = function.apply(*folded)
    return tuple(x.reshape(n, b, *x.shape[1:]) for x in outputs), (0,) * len(outputs)
