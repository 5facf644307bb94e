"""Batch normalisation as a function: batches are padded, and modules must not change.

`FunctionalBatchNorm` takes the statistics of a batch from its real examples alone, and records the
new running statistics in the step's context instead of writing them to its buffers.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import InputError
from ..params import Params
from .step import StepModule
from .surgery import replace

BatchNormMode = Literal["train", "frozen"]


def masked_moments(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the moments of each channel over the examples that are no padding.

    Args:
        x: ``[b, C, ...]``.
        weight: ``[b]``, 0 for padding examples; None: there is no padding.

    Returns:
        Mean ``[C]``, biased variance ``[C]``, and the number of values of a channel (scalar).
    """
    w = x.new_ones(x.shape[0]) if weight is None else weight.to(x.dtype)
    axes = [0, *range(2, x.dim())]
    count = w.sum() * x[0, 0].numel()
    w = w.view(-1, *[1] * (x.dim() - 1))
    mean = (x * w).sum(axes) / count.clamp(min=1)
    centred = x - mean.view(1, -1, *[1] * (x.dim() - 2))
    return mean, (centred.square() * w).sum(axes) / count.clamp(min=1), count


class FunctionalBatchNorm(StepModule):
    """Batch normalisation that ignores padding and records its new running statistics.

    With ``trained`` False (frozen parameters, or frozen statistics) it uses its running statistics
    in training, too.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor
    running_var: Tensor
    per_example: int | None = None  # values of a channel in one example, once that is known

    def __init__(self, norm: nn.modules.batchnorm._BatchNorm, trained: bool) -> None:
        super().__init__()
        self.trained = trained
        self.state_buffers = ("running_mean", "running_var") if trained else ()
        self.register_parameter("weight", norm.weight)
        self.register_parameter("bias", norm.bias)
        self.register_buffer("running_mean", norm.running_mean)
        self.register_buffer("running_var", norm.running_var)
        self.eps = norm.eps
        self.momentum = float(norm.momentum or 0.0)

    def reset_parameters(self) -> None:
        """Set unit scale, no shift, and the statistics of standardised inputs; in place."""
        for name, initial in (("weight", 1), ("bias", 0), ("running_mean", 0), ("running_var", 1)):
            if getattr(self, name) is not None:
                getattr(self, name).data.fill_(initial)

    def forward(self, x: Tensor) -> Tensor:
        self.per_example = x[0, 0].numel()
        if not (self.trained and self.step.training):
            return F.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        dtype, x = x.dtype, x.float() if x.dtype == torch.bfloat16 else x
        shape = (1, -1, *[1] * (x.dim() - 2))
        per_channel = x.numel() // x.shape[1]
        if self.step.weight is None and per_channel > 1:  # no padding: PyTorch's kernel will do
            axes = [0, *range(2, x.dim())]
            var, mean = torch.var_mean(x.detach(), axes, correction=0)
            count = mean.new_full((), per_channel)
            y = F.batch_norm(x, None, None, self.weight, self.bias, training=True, eps=self.eps)
        else:
            mean, var, count = masked_moments(x, self.step.weight)
            scale = torch.rsqrt(var + self.eps)
            if self.weight is not None:
                scale = scale * self.weight
            shift = -mean * scale if self.bias is None else self.bias - mean * scale
            y = x * scale.view(shape) + shift.view(shape)
        unbiased = var * count / (count - 1).clamp(min=1)
        for name, new in (("running_mean", mean), ("running_var", unbiased)):
            old = self.get_buffer(name)
            self.record(name, torch.lerp(old, new.to(old.dtype), self.momentum))
        return y.to(dtype)


def check_variances(tensors: Params, received: Params) -> None:
    """Check the running variances among ``tensors``; those of a name in ``received`` are changes of
    the ones there. Raises InputError where some are below 0; then evaluations would have no
    numbers."""
    for name in sorted(tensors):
        if name.endswith("running_var"):
            before = received.get(name, torch.zeros_like(tensors[name]))
            if (tensors[name] + before < -1e-5 * before).any():  # beyond rounding
                raise InputError(f"{name} holds variances below 0")


def use_functional_batch_norm(model: nn.Module, mode: BatchNormMode) -> None:
    """Replace every batch normalisation in ``model`` by a `FunctionalBatchNorm`, in place.

    With ``frozen``, every one leaves its running statistics as they are; with ``train``, only those
    do whose parameters are frozen. Raises InputError where one has no running statistics, or
    cumulative ones (momentum None)."""
    all_trained = all(parameter.requires_grad for parameter in model.parameters())
    for name, norm in list(model.named_modules()):
        if not isinstance(norm, nn.modules.batchnorm._BatchNorm):
            continue
        if norm.running_mean is None or norm.momentum is None:
            raise InputError(
                f"{name} must have track_running_stats=True and a momentum, since batches are "
                f"padded; it has track_running_stats={norm.track_running_stats} and "
                f"momentum={norm.momentum}"
            )
        trained = norm.weight.requires_grad if norm.affine else all_trained
        replace(model, name, FunctionalBatchNorm(norm, trained and mode == "train"))
