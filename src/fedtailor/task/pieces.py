"""The cross-entropy of a language model without its logits whole in memory.

A batch of 4 x 512 tokens has logits of 1 GB for a vocabulary of 128,000, and their gradient as
many. `ScoringHead`, in the place of the model's output layer, computes the loss of a piece of the
tokens at a time, and its slope with respect to the layer's input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
        layer = input.flatten(0, 1).to(to), self.weight.to(to), bias
        loss, hits, _ = apply(*layer, targets.flatten(), torch.is_grad_enabled())
        self._scored = torch.stack((loss, hits), -1).view(*targets.shape, 2)
        return self._scored

    def returned(self, output: Tensor) -> bool:
        """Say whether the model's output is what this layer made of targets in the same pass."""
        scored, self._scored = self._scored, None
        return output is scored


class _Scored(torch.autograd.Function):
    """(input [N, d], weight [V, d], bias [V] or None, targets [N], whether there is a gradient) ->
    (loss [N], hits [N], slope of the loss with respect to the input [N, d] or, without a gradient,
    [N, 0])."""

    @staticmethod
    def forward(
        input: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, slopes: bool
    ) -> Any:
        found = []
        kept: Any = slice(None)
        if not targets.is_cuda:  # where the program would have to wait for their number
            kept = (targets != IGNORED).nonzero()[:, 0]
        for labels, rows in _pieces(weight, targets[kept], input[kept]):
            logits = F.linear(rows, weight, bias).float()
            highest, best = logits.max(-1)
            is_real, label = labels != IGNORED, labels.clamp(min=0)
            right = logits.gather(1, label[:, None])[:, 0]
            p = (logits - highest[:, None]).exp_()
            total = p.sum(-1)
            loss = torch.where(is_real, total.log() + highest - right, 0)
            slope = rows[:, :0]
            if slopes:
                slope = p.to(weight) @ weight / total[:, None].to(weight) - weight[label]
                slope = torch.where(is_real[:, None], slope, 0)
            found.append((loss, (best == labels).to(loss), slope))
        columns = [torch.cat(column) for column in zip(*found, strict=True)]
        if targets.is_cuda:
            return tuple(columns)
        full = [one.new_zeros(len(targets), *one.shape[1:]) for one in columns]
        for one, column in zip(full, columns, strict=True):
            one[kept] = column
        return tuple(full)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:4], output[2])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor | None, _: Any, of_slope: Tensor | None) -> Any:
        input, weight, bias, targets, slope = ctx.saved_tensors
        if of_loss is None:
            of_loss = torch.zeros_like(input[:, 0])
        of_input = slope * of_loss[:, None].to(slope)
        if of_slope is None and not any(ctx.needs_input_grad[1:3]):
            return of_input, None, None, None, None
        curved, of_weight, of_bias = _gradients(input, weight, bias, targets, of_loss, of_slope)
        of_input = of_input + curved
        return of_input, of_weight, None if bias is None else of_bias.to(bias), None, None

    @staticmethod
    def vmap(info: Any, dims: Any, *inputs: Any) -> Any:
        """Clients share a pass if they share the layer; else each has its own."""
        apply: Callable[..., Any] = _Scored.apply
        n = info.batch_size
        if dims[1] is None and dims[2] is None:
            input, targets = (
                inputs[i].expand(n, *inputs[i].shape) if dim is None else inputs[i].movedim(dim, 0)
                for i, dim in ((0, dims[0]), (3, dims[3]))
            )
            flat = input.flatten(0, 1), *inputs[1:3], targets.flatten(), inputs[4]
            columns = [one.unflatten(0, (n, -1)) for one in apply(*flat)]
        else:
            pairs = [*zip(inputs, dims, strict=True)]
            rows = [
                apply(*(x if d is None else x.select(d, i) for x, d in pairs)) for i in range(n)
            ]
            columns = [torch.stack(column) for column in zip(*rows, strict=True)]
        return tuple(columns), (0,) * len(columns)


def _gradients(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    of_loss: Tensor,
    of_slope: Tensor | None,
) -> tuple[Tensor | float, Tensor, Tensor]:
    """What the slope adds to the gradient of the input, and the gradients of the weights and the
    bias, where the loss has the gradient ``of_loss`` ``[N]`` and its slope ``of_slope`` ``[N, d]``,
    if it is used.

    With p the probabilities, e the target's one-hot vector and u = W b for the slope's gradient b,
    the slope is W' (p - e), and the gradient of the logits a (p - e) + p (u - p'u).
    """
    of_input, of_weight = [], torch.zeros_like(weight, dtype=torch.float32)
    of_bias = of_weight.new_zeros(len(weight))
    numbers = torch.arange(len(weight), device=targets.device)
    second = () if of_slope is None else (of_slope,)
    for labels, rows, a, *used in _pieces(weight, targets, input, of_loss, *second):
        p = F.linear(rows, weight, bias).float().softmax(-1)
        p = torch.where((labels != IGNORED)[:, None], p, 0)
        change = p - (labels[:, None] == numbers).float()  # p - e, [n, V]
        of_logits = change * a[:, None].float()
        for b in used:
            u = F.linear(b.to(weight), weight).float()
            curve = p * (u - (p * u).sum(-1, keepdim=True))
            of_input.append(curve.to(weight) @ weight)
            of_logits = of_logits + curve
            of_weight = of_weight + change.T @ b.float()
        of_weight = of_weight + of_logits.T @ rows.float()
        of_bias = of_bias + of_logits.sum(0)
    return torch.cat(of_input) if of_input else 0.0, of_weight.to(weight), of_bias


def _pieces(weight: Tensor, *columns: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Some rows of each column at a time."""
    size = max(1, _CELLS // len(weight))
    yield from zip(*(torch.split(column, size) for column in columns), strict=True)
