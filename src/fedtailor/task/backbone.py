"""A pretrained model, and what methods need to know of its structure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

import torch
from annotated_types import Ge, Lt
from torch import Tensor, nn

from ..objectives import DEFAULT
from ..objectives.objective import Objective
from ..params import Batch
from .batch_norm import BatchNormMode


def _only_inputs(batch: Batch) -> dict[str, Any]:
    return {name: value for name, value in batch.items() if name not in ("labels", "weight")}


def _plain_logits(output: Any) -> Tensor:
    if hasattr(output, "start_logits"):
        return torch.stack((output.start_logits, output.end_logits), -1)
    result: Tensor = output if isinstance(output, Tensor) else output.logits
    return result


def sequences(batch: Batch) -> Batch:
    """Return the batch with each sequence as an example: ``[b, S, L]`` becomes ``[b * S, L]``.
    Sequences that a row lacks have no real token."""
    ids = batch.get("input_ids")
    if ids is None or ids.dim() < 3:
        return batch
    return {n: v.flatten(0, 1) if v.shape == ids.shape else v for n, v in batch.items()}


@dataclass(frozen=True)
class LoRAOptions:
    """What holds for every LoRA in the model, whichever method adds it; the words are PEFT's."""

    rslora: bool = False  # the scaling is lora_alpha / sqrt(rank), not lora_alpha / rank
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0  # of LoRA's inputs, in training
    dora: bool = False  # the norms of the weights' rows are trained apart from their directions

    def scaling(self, rank: int, lora_alpha: float) -> float:
        """LoRA's s.

        >>> LoRAOptions().scaling(4, 16.0), LoRAOptions(rslora=True).scaling(4, 16.0)
        (4.0, 8.0)
        """
        return lora_alpha / (rank**0.5 if self.rslora else rank)


@dataclass(frozen=True)
class Backbone:
    """A pretrained model and what methods need to know of its structure.

    ``prepare`` turns a batch's inputs (``input_ids`` int64 ``[b, L]`` and ``attention_mask`` float
    ``[b, L]``, or ``pixel_values`` float ``[b, C, H, W]``) into the keyword arguments of the
    model's forward. ``logits`` takes the logits out of forward's output: ``[b, classes]`` or
    ``[b, L, outputs]``. ``blocks`` lists, for each transformer block, the paths of its
    adaptable projections (attention output, feed-forward output). ``head`` lists the paths of the
    task head's modules. ``objective`` is what the logits are for. With ``batch_norm`` frozen,
    training uses the running statistics and leaves them as they are. ``lora`` holds for the LoRA
    that methods add.
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
    # the same with exact weights, where these are rounded
    exact: Callable[[], Backbone] | None = field(default=None, repr=False, compare=False)
    lora: LoRAOptions = LoRAOptions()

    @cached_property
    def ends(self) -> frozenset[int]:
        """The tokens that end a text: the tokenizer's, of those that the model's generation config
        names the special ones, and that which ends an answer in a conversation. None without a
        tokenizer."""
        if self.tokenizer is None:
            return frozenset()
        named = getattr(getattr(self.model, "generation_config", None), "eos_token_id", None)
        special = {*(named if isinstance(named, list) else [named])}
        special &= self.tokenizer.added_tokens_decoder.keys()
        usual = frozenset(special | {self.tokenizer.eos_token_id} - {None})
        return usual | self.objective.turn_ends(self.tokenizer)
