"""A pretrained model, and what methods need to know of its structure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..objectives import DEFAULT
from ..objectives.objective import Objective
from ..params import Batch
from .batch_norm import BatchNormMode


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
    model's forward. ``logits`` takes the logits out of forward's output: ``[b, classes]`` or
    ``[b, L, vocabulary]``. ``blocks`` lists, for each transformer block, the paths of its
    adaptable projections (attention output, feed-forward output). ``head`` lists the paths of the
    task head's modules. ``objective`` is what the logits are for. With ``batch_norm`` frozen,
    training uses the running statistics and leaves them as they are.
    """

    model: nn.Module
    objective: Objective = DEFAULT
    prepare: Callable[[Batch], dict[str, Any]] = _only_inputs
    logits: Callable[[Any], Tensor] = _plain_logits
    blocks: tuple[tuple[str, ...], ...] = ()
    head: tuple[str, ...] = ()
    name: str = "module"
    encoder_prefix: str = ""  # before the paths of the model that transformers loads: "encoder."
    tokenizer: Any = field(default=None, repr=False)
    pretrained: bool = True
    batch_norm: BatchNormMode = "train"

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end a text: the tokenizer's, and of those that the model's generation
        config names the special ones. None without a tokenizer."""
        if self.tokenizer is None:
            return frozenset()
        named = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        special = {*(named if isinstance(named, list) else [named])}
        special &= self.tokenizer.added_tokens_decoder.keys()
        return frozenset(special | {self.tokenizer.eos_token_id} - {None})
