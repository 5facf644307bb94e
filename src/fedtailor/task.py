"""A model and its loss as pure functions of a state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from . import random
from .layers import StepContext, trace_batch_norm, trace_dropout
from .params import Params

Batch = dict[str, Tensor]
Kind = Literal["classification", "causal-lm"]
Precision = Literal["fp32", "bf16"]


def _only_inputs(batch: Batch) -> dict[str, Any]:
    return {name: value for name, value in batch.items() if name not in ("labels", "weight")}


def _plain_logits(output: Any) -> Tensor:
    result: Tensor = output if isinstance(output, Tensor) else output.logits
    return result


@dataclass(frozen=True)
class Backbone:
    """A pretrained model and what methods need to know of its structure.

    ``prepare`` turns a batch's inputs (``input_ids`` int64 ``[b, L]`` and ``attention_mask`` float
    ``[b, L]``, or ``pixel_values`` float ``[b, C, H, W]``) into the keyword arguments of the
    model's forward; ``logits`` takes the logits out of what forward returns: ``[b, classes]`` or
    ``[b, L, vocabulary]``. ``blocks`` lists, for each transformer block, the paths of its
    adaptable projections (attention output, feed-forward output); ``head`` the paths of the task
    head's modules.
    """

    model: nn.Module
    kind: Kind = "classification"
    prepare: Callable[[Batch], dict[str, Any]] = _only_inputs
    logits: Callable[[Any], Tensor] = _plain_logits
    blocks: tuple[tuple[str, ...], ...] = ()
    head: tuple[str, ...] = ()
    name: str = "module"
    encoder_prefix: str = ""  # of the paths of what transformers itself would load, e.g. "encoder."
    tokenizer: Any = field(default=None, repr=False)


@dataclass(frozen=True)
class Scores:
    """What a batch's logits are worth, one number an example, each ``[b]``: summed loss, correct
    predictions, and how many predictions there were (target tokens for language modelling)."""

    loss: Tensor
    correct: Tensor
    count: Tensor


class Task:
    """A backbone as adapted by a method, its initial state, and its loss.

    ``state`` holds every trained parameter and the running statistics of every trained batch
    normalisation; all else is frozen inside the model, which is never changed again.
    """

    def __init__(
        self,
        backbone: Backbone,
        adapt: Callable[[Backbone], nn.Module] = lambda backbone: backbone.model,
        *,
        seed: int = 0,
        precision: Precision = "fp32",
        device: str | torch.device = "cpu",
    ) -> None:
        """Adapt a copy of ``backbone``'s model; what adapters start from depends on ``seed``."""
        self.precision = precision
        self.device = torch.device(device)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(random.key(seed, "adapters")))
            own = copy.copy(backbone)
            object.__setattr__(own, "model", copy.deepcopy(backbone.model))
            self.model = adapt(own).to(self.device)
        self.backbone = own
        self.model.eval()  # for good: dropout and batch normalisation follow the step instead
        self._step = StepContext()
        trace_dropout(self.model, self._step)
        self.buffers = frozenset(trace_batch_norm(self.model, self._step))
        self.state = self._take_state()

    def _take_state(self) -> Params:
        state = {n: p.detach().clone() for n, p in self.model.named_parameters() if p.requires_grad}
        buffers = dict(self.model.named_buffers())
        state |= {name: buffers[name].detach().clone() for name in sorted(self.buffers)}
        self.model.requires_grad_(False)
        return state

    def in_head(self, name: str) -> bool:
        """Whether a state's name belongs to the task head."""
        return any(name.startswith(path + ".") for path in self.backbone.head)

    def logits(self, state: Params, batch: Batch) -> Tensor:
        """The model's output at ``state`` in evaluation mode, float32 ``[b, classes]`` or
        ``[b, L, vocabulary]``."""
        self._step.enter(training=False)
        return self._call(state, batch)

    def _call(self, state: Params, batch: Batch) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            output = functional_call(self.model, state, (), self.backbone.prepare(batch))
        return self.backbone.logits(output).float()

    def loss(self, state: Params, batch: Batch, key: Tensor) -> tuple[Tensor, Params]:
        """The mean training loss over a batch's real examples (real target tokens for language
        modelling) and the new running statistics. ``key`` seeds dropout."""
        weight = batch.get("weight")
        self._step.enter(training=True, key=key, weight=weight)
        scores = self.score(self._call(state, batch), batch)
        buffers = self._step.leave()
        if weight is None:
            return scores.loss.sum() / scores.count.sum(), buffers
        total = (scores.count * weight).sum().clamp(min=1.0)
        return (scores.loss * weight).sum() / total, buffers

    def score(self, logits: Tensor, batch: Batch) -> Scores:
        """Cross-entropy (natural logarithm) and top-1 hits, an example."""
        if self.backbone.kind == "classification":
            labels = batch["labels"]
            loss = F.cross_entropy(logits, labels, reduction="none")
            return Scores(loss, (logits.argmax(-1) == labels).float(), torch.ones_like(loss))
        targets, real = batch["input_ids"][:, 1:], batch["attention_mask"][:, 1:]
        logits = logits[:, :-1]
        flat = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        loss = flat.view(targets.shape) * real
        hits = (logits.argmax(-1) == targets) * real
        return Scores(loss.sum(1), hits.sum(1), real.sum(1))
