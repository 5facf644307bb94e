"""A model and its loss as pure functions of a state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from .params import Params

Batch = dict[str, Tensor]
Kind = Literal["classification", "causal-lm"]


def _no_change(batch: Batch) -> dict[str, Any]:
    return dict(batch)


def _identity(output: Any) -> Tensor:
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
    prepare: Callable[[Batch], dict[str, Any]] = _no_change
    logits: Callable[[Any], Tensor] = _identity
    blocks: tuple[tuple[str, ...], ...] = ()
    head: tuple[str, ...] = ()
    name: str = "module"
    tokenizer: Any = field(default=None, repr=False)
