"""Functions from a batch to the keyword arguments of a model's forward.

transformers builds attention masks in ways that depend on the data, which ``torch.func.vmap`` can't
follow, but it uses a four-dimensional float mask without a change. So `TextInputs` builds the mask,
and everything else that an architecture would derive from the token ids.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import InputError
from ..params import Batch, constant
from .attention import causal_mask

Prepare = Callable[[Batch], dict[str, Any]]

ENCODERS = frozenset({"bert", "roberta", "xlm-roberta", "distilbert", "electra", "mpnet"})
DECODERS = frozenset({"gpt2", "llama", "mistral", "qwen2", "qwen3"})

_OFFSET = frozenset({"roberta", "xlm-roberta", "mpnet"})  # positions start after the padding index
_TYPED = frozenset({"bert", "roberta", "xlm-roberta", "electra"})  # token types
_TWO_PARTS = frozenset({"t5", "bart"})  # an encoder and a decoder
_HIDDEN = -1e9  # finite also in bfloat16: a row with nothing to attend to stays finite


@dataclass(frozen=True)
class TextInputs:
    """The inputs of a text model: token ids, the mask, positions. Padding is on the right; on the
    left where a batch says its positions, ``position_ids``. A mask that is longer than the ids
    begins with tokens that were read before.

    A model type that is in neither ``ENCODERS`` nor ``DECODERS`` gets transformers' own
    two-dimensional mask; whether it runs under vmap depends on its code.
    """

    name: str
    model_type: str
    pooled: bool = False  # forward takes the mask of real tokens, too
    max_length: int | None = None  # tokens
    padding_idx: int = 0
    window: int | None = None  # tokens that a token sees in sliding attention, itself included
    by_layer: bool = False  # whether the model has both full and sliding layers
    start: int | None = None  # the token that a decoder with an encoder begins with
    fused: bool = False  # whether `attention` is the model's

    @classmethod
    def of(cls, name: str, config: Any, *, pooled: bool, fused: bool = False) -> TextInputs:
        """Return the inputs of the model with this Hugging Face configuration."""
        kind = config.model_type
        padding_idx = config.pad_token_id if kind in _OFFSET else 0
        max_length: Any = getattr(config, "max_position_embeddings", None)
        if kind in _OFFSET:
            max_length -= padding_idx + 1
        if not getattr(config, "position_biased_input", True):  # DeBERTa-v2, by distances alone
            max_length = None
        by_layer = "sliding_attention" in (getattr(config, "layer_types", None) or ())
        window = getattr(config, "sliding_window", None)
        if kind.startswith("qwen") and not by_layer:
            window = None
        start = None
        if getattr(config, "is_encoder_decoder", False):
            start = getattr(config, "decoder_start_token_id", None)
            start = config.pad_token_id if start is None else start
        return cls(name, kind, pooled, max_length, padding_idx, window, by_layer, start, fused)

    def __call__(self, batch: Batch) -> dict[str, Any]:
        ids, real = batch["input_ids"], batch["attention_mask"]
        length = ids.shape[1]
        if self.start is not None:
            written = self._written(batch)
            length = max(length, written.shape[1])
        if self.max_length is not None and length > self.max_length:
            raise InputError(
                f"{length} tokens are too many for {self.name}; data.max_length may be at most "
                f"{self.max_length}"
            )
        inputs: dict[str, Any] = {"input_ids": ids}
        if self.pooled:
            inputs["real"] = real
        is_empty = real.sum(1, keepdim=True) == 0  # a mean over none is undefined
        seen = torch.cat([torch.where(is_empty, 1.0, real[:, :1]), real[:, 1:]], 1)
        segments, positions = batch.get("segments"), batch.get("position_ids")
        if segments is not None:  # several texts in a row
            inputs["position_ids"] = positions
            inputs["attention_mask"] = self._causal(real, length, segments)
        elif self.model_type in DECODERS:
            # with padding on the right, no real token sees any if it sees none that comes later
            plain = self.fused and self.window is None and positions is None
            mask = causal_mask(ids) if plain else self._causal(seen, ids.shape[1])
            inputs["attention_mask"] = mask
            if positions is None:
                positions = torch.arange(length, device=ids.device)[None]
            inputs["position_ids"] = positions
        elif self.model_type in ENCODERS | _TWO_PARTS:
            inputs["attention_mask"] = (1.0 - seen[:, None, None].float()) * _HIDDEN
        else:
            inputs["attention_mask"] = seen.long()
        if self.start is not None:
            inputs["decoder_input_ids"] = written
        if self.model_type in _TWO_PARTS:
            all_real = torch.ones_like(written)
            inputs["decoder_attention_mask"] = self._causal(all_real, written.shape[1])
        if self.model_type in _OFFSET:
            count = real.long()
            inputs["position_ids"] = count.cumsum(1) * count + self.padding_idx
        if self.model_type in _TYPED or "token_type_ids" in batch:
            inputs["token_type_ids"] = batch.get("token_type_ids", torch.zeros_like(ids))
        return inputs

    def _written(self, batch: Batch) -> Tensor:
        """What the decoder reads ``[b, T]``: its first token, then the targets but the last; their
        padding is predicted from alone, and so any token. Without targets the first token alone."""
        assert self.start is not None
        first = torch.full_like(batch["input_ids"][:, :1], self.start)
        if "labels" not in batch:
            return first
        return torch.cat([first, batch["labels"][:, :-1].clamp(min=0)], 1)

    @property
    def masks(self) -> bool:
        """Whether the masks of a decoder are made here."""
        return self.model_type in DECODERS | _TWO_PARTS

    def _causal(
        self, real: Tensor, length: int, segments: Tensor | None = None
    ) -> Tensor | dict[str, Tensor]:
        """What the last so many tokens see; of several texts in a row, those of their own."""
        positions = torch.arange(real.shape[1], device=real.device)
        distance = positions[-length:, None] - positions
        visible = (distance >= 0).float() * real[:, None, None].float()  # [b, 1, L, L]
        if segments is not None:
            visible = visible * (segments[:, None, :, None] == segments[:, None, None]).float()
        full = (1.0 - visible) * _HIDDEN
        if self.window is None:
            return full
        sliding = (1.0 - visible * (distance < self.window)) * _HIDDEN
        return {"full_attention": full, "sliding_attention": sliding} if self.by_layer else sliding


def both_masks(encoder: nn.Module, args: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Make the masks of ModernBERT's full and sliding layers of that of the real tokens, which its
    classifier needs, too; a forward pre-hook."""
    real = inputs["attention_mask"]
    positions = torch.arange(real.shape[1], device=real.device)
    config: Any = encoder.config
    near = (positions[:, None] - positions).abs() <= config.sliding_window
    visible = real[:, None, None].float()  # [b, 1, 1, L]
    full, sliding = (1.0 - visible) * _HIDDEN, (1.0 - visible * near) * _HIDDEN
    masks = {"full_attention": full, "sliding_attention": sliding}
    return args, {**inputs, "attention_mask": masks}


def _per_channel(values: tuple[float, ...], like: Tensor) -> Tensor | float:
    """``values`` to compute with ``like`` ``[b, channels, height, width]``; one alone is a number.
    In float32 both round alike."""
    if len(values) == 1:
        return values[0]
    return constant(values, like.dtype, like.device).view(1, -1, 1, 1)


@dataclass(frozen=True)
class ImageInputs:
    """The inputs of an image model: pictures with values in [0, 1], resized (bilinear, antialiased)
    and normalised. Grey ones get as many equal channels as the model has."""

    name: str
    mean: tuple[float, ...]  # one a channel, or one for all
    std: tuple[float, ...]
    size: tuple[int, int]  # height and width in pixels, for all pictures
    channels: int = 3
    argument: str = "pixel_values"
    interpolate: bool = False  # position embeddings, which are those of another size

    def __call__(self, batch: Batch) -> dict[str, Any]:
        x = batch["pixel_values"]
        channels, height, width = x.shape[1:]
        if channels not in (1, self.channels):
            raise InputError(
                f"pictures have {channels} channels; {self.name} takes 1 or {self.channels}"
            )
        if self.size != (height, width):
            x = F.interpolate(x, self.size, mode="bilinear", align_corners=False, antialias=True)
        x = x.expand(-1, self.channels, -1, -1)
        mean, std = _per_channel(self.mean, x), _per_channel(self.std, x)
        inputs: dict[str, Any] = {self.argument: (x - mean) / std}
        if self.interpolate:
            inputs["interpolate_pos_encoding"] = True
        return inputs


@dataclass(frozen=True)
class ModuleInputs:
    """The inputs of any module: by name if forward has arguments of these names, else a single
    input as forward's first argument. ``token_type_ids`` are left out if forward has none."""

    arguments: tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module) -> ModuleInputs:
        """Read the signature of ``model``'s forward; InputError where it has no named argument."""
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        parameters = inspect.signature(model.forward).parameters.values()
        arguments = tuple(p.name for p in parameters if p.kind in named)
        if not arguments:
            raise InputError(
                f"forward of {type(model).__name__} has no named argument; it needs at least one"
            )
        return cls(arguments)

    def __call__(self, batch: Batch) -> dict[str, Any]:
        unread = {"labels", "weight", *({"token_type_ids"} - {*self.arguments})}
        inputs = {k: v for k, v in batch.items() if k not in unread}
        if set(inputs) <= set(self.arguments):
            return inputs
        if len(inputs) > 1:
            raise InputError(
                f"forward takes {', '.join(self.arguments)}; for these data it must take "
                f"{', '.join(inputs)}"
            )
        return dict(zip(self.arguments, inputs.values(), strict=False))
