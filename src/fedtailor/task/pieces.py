"""The cross-entropy of a language model without its logits whole in memory.

A batch of 4 x 512 tokens has logits of 1 GB for a vocabulary of 128,000, and their gradient as
many. `ScoringHead`, in the place of the model's output layer, computes the loss of a piece of the
tokens at a time, and its slope with respect to the layer's input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..objectives.objective import IGNORED
from .step import StepModule
from .surgery import replace

_CELLS = 2**23  # of a piece's logits


def score_in_pieces(model: nn.Module) -> ScoringHead | None:
    """Replace the output layer of a language model of transformers by a `ScoringHead`, in place,
    and return it; None if it has none that is an nn.Linear, or adds to it, as BART does."""
    find = getattr(model, "get_output_embeddings", None)
    linear = None if find is None else find()
    if type(linear) is not nn.Linear or hasattr(model, "final_logits_bias"):
        return None
    (path,) = (path for path, module in model.named_modules() if module is linear)
    head = ScoringHead(linear)
    replace(model, path, head)
    return head


class ScoringHead(StepModule, nn.Linear):
    """An nn.Linear; if the step has targets, its output is their loss and hits instead."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._scored: Tensor | None = None

    def forward(self, input: Tensor) -> Tensor:
        """``[b, L, d]`` -> ``[b, L, vocabulary]``, or ``[b, L, 2]``."""
        targets = self.step.targets
        if targets is None:
            return F.linear(input, self.weight, self.bias)
        kind = input.device.type
        to = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        bias = None if self.bias is None else self.bias.to(to)
        apply: Callable[..., tuple[Tensor, ...]] = _Scored.apply
        flat = input.flatten(0, 1).to(to)
        loss, hits, _ = apply(flat, self.weight.to(to), bias, targets.flatten())
        self._scored = torch.stack((loss, hits), -1).view(*targets.shape, 2)
        return self._scored

    def returned(self, output: Tensor) -> bool:
        """Say whether the model's output is what this layer made of targets in the same pass."""
        scored, self._scored = self._scored, None
        return output is scored


class _Scored(torch.autograd.Function):
    """(input [N, d], weight [V, d], bias [V] or None, targets [N]) -> (loss [N], hits [N], slope of
    the loss with respect to the input [N, d])."""

    generate_vmap_rule = True

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Any:
        found = []
        for labels, rows in _pieces(weight, targets, input):
            logits = F.linear(rows, weight, bias).float()
            hits = (logits.argmax(-1) == labels).to(logits)
            found.append((_loss(logits, labels), hits, _slope(logits, weight, labels)))
        return tuple(torch.cat(column) for column in zip(*found, strict=True))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs, output[2])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor | None, _: Any, of_slope: Tensor | None) -> Any:
        input, weight, bias, targets, slope = ctx.saved_tensors
        if of_slope is None and of_loss is not None:
            layer: Any = (None, None)
            if any(ctx.needs_input_grad[1:3]):
                layer = _layer_gradients(input, weight, bias, targets, of_loss)
            return slope * of_loss[:, None].to(slope), *layer, None
        of_loss = torch.zeros_like(input[:, 0]) if of_loss is None else of_loss
        of_slope = torch.zeros_like(input) if of_slope is None else of_slope
        layer = [x for x in (weight, bias) if x is not None]
        found = []
        for labels, rows, *gradients in _pieces(weight, targets, input, of_loss, of_slope):
            outputs = partial(_outputs, labels)
            found.append(torch.func.vjp(outputs, rows, *layer)[1](tuple(gradients)))
        of_input, *of_layer = zip(*found, strict=True)
        of_layer = [sum(pieces) for pieces in of_layer] + [None] * (bias is None)
        return torch.cat(of_input), *of_layer, None


def _layer_gradients(
    input: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, of_loss: Tensor
) -> tuple[Tensor, Tensor | None]:
    """The gradients of the weights and the bias, where the loss has ``of_loss`` ``[N]``."""
    of_weight, of_bias = torch.zeros_like(weight, dtype=torch.float32), torch.zeros(())
    numbers = torch.arange(len(weight), device=weight.device)
    for labels, rows, scale in _pieces(weight, targets, input, of_loss):
        change = F.linear(rows, weight, bias).float().softmax(-1)
        change = change - (labels[:, None] == numbers).float()
        change = change * torch.where(labels != IGNORED, scale, 0)[:, None]
        of_weight = of_weight + change.T @ rows.float()
        of_bias = of_bias.to(change) + change.sum(0)
    return of_weight.to(weight), None if bias is None else of_bias.to(bias)


def _outputs(
    labels: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    logits = F.linear(rows, weight, bias).float()
    return _loss(logits, labels), _slope(logits, weight, labels)


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORED)


def _slope(logits: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    slope = logits.softmax(-1).to(weight.dtype) @ weight - weight[labels.clamp(min=0)]
    return torch.where((labels != IGNORED)[:, None], slope, 0)


def _pieces(weight: Tensor, *columns: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Some rows of each column at a time."""
    size = max(1, _CELLS // len(weight))
    yield from zip(*(torch.split(column, size) for column in columns), strict=True)
