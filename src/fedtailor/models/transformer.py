"""Models of the library transformers: their weights, their head, their pictures.

Configurations, weights and image processors come from a folder or the Hugging Face hub (`source`).
"""

from __future__ import annotations

import inspect
import os
import re
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import InputError, brief
from ..objectives import CausalLM
from ..objectives.objective import Objective
from ..params import not_finite
from . import attention
from .blocks import find_head
from .config import ModelConfig
from .inputs import ENCODERS, ImageInputs, Prepare, TextInputs, both_masks
from .linear import linearise
from .packages import BUILTIN, Modality, new_head
from .pooled import Pooled
from .source import origin, transformers_config

_MOST_LAYERS = 1000
_COUNTS = re.compile(r"(layers?|experts|depths)$")  # fields that say how many modules there are
_NUMBER = re.compile(r"\.\d+\.")
_SIDE = 224  # pixels, for a model that names no size


def build_transformer(
    config: ModelConfig, source: str, objective: Objective, modality: Modality, num_classes: int
) -> tuple[nn.Module, Prepare, frozenset[str]]:
    """Build a model with the weights of ``source``, a folder or a hub name, or with random ones;
    return it, the function that turns a batch into its inputs, and the names of its new parameters.
    Raises InputError where it can't be loaded, lacks weights, or is of another kind."""
    hf = transformers_config(source, config)
    _set_dropout(hf, config.dropout)
    if (outputs := objective.num_outputs(num_classes)) is not None:
        hf.num_labels = outputs
    if modality == "text":
        model, new = _text_model(config, source, hf, objective)
        if hf.model_type == "modernbert":
            encoder: Any = model.encoder if isinstance(model, Pooled) else model.base_model
            encoder.register_forward_pre_hook(both_masks, with_kwargs=True)
        pooled, fused = isinstance(model, Pooled), attention.is_used(model)
        return model, TextInputs.of(config.name, hf, pooled=pooled, fused=fused), new
    images = _image_inputs(config, source, hf)
    model, new = _load_weights(config, source, hf, objective.auto_classes[modality])
    parameters = inspect.signature(model.forward).parameters
    can_interpolate = "interpolate_pos_encoding" in parameters  # others check the size themselves
    return model, replace(images, interpolate=images.interpolate and can_interpolate), new


def _set_dropout(hf: Any, dropout: float) -> None:
    """Set every dropout probability of a configuration; that of attention weights to 0."""
    for field, value in hf.to_dict().items():
        is_number = isinstance(value, float | int) and not isinstance(value, bool)
        if is_number and ("dropout" in field or field.endswith("pdrop")):
            setattr(hf, field, 0.0 if field.startswith("att") else dropout)


def _text_model(
    config: ModelConfig, source: str, hf: Any, objective: Objective
) -> tuple[nn.Module, frozenset[str]]:
    """Build a language model, an encoder with our head, a decoder with its ``score``, or one of
    transformers' own classifiers; return it with the names of its new parameters."""
    if getattr(hf, "is_encoder_decoder", False) and objective.num_outputs(0) is not None:
        raise InputError(
            f"model {config.name!r} is a {hf.model_type}, an encoder and a decoder, which writes "
            f"texts; {objective.name!r} needs an encoder such as BERT or a decoder such as Llama"
        )
    if objective.has_decoder and not getattr(hf, "is_encoder_decoder", False):
        raise InputError(
            f"model {config.name!r} is a {hf.model_type}; {objective.name!r} needs an encoder and "
            "a decoder such as T5 or BART"
        )
    builtin = BUILTIN.get(config.name)
    pooling = config.pooling or ("native" if builtin is None else builtin.pooling)
    if objective.num_outputs(0) is None or objective.per_token or pooling == "native":
        model, new = _load_weights(config, source, hf, objective.auto_classes["text"])
        score, base = getattr(model, "score", None), getattr(model, "base_model", None)
        if isinstance(score, nn.Linear) and isinstance(base, nn.Module) and not objective.per_token:
            model = Pooled(base, score, "last", config.dropout)
        return model, new
    encoder, _ = _load_weights(config, source, hf, "AutoModel")
    if getattr(encoder, "pooler", None) is not None:
        encoder.register_module("pooler", None)  # the logits don't depend on it
    head = new_head(hf.hidden_size, hf.num_labels)
    return Pooled(encoder, head, "mean", config.dropout), frozenset()


def _load_weights(
    config: ModelConfig, source: str, hf: Any, auto_class: str
) -> tuple[nn.Module, frozenset[str]]:
    """Return the model and the names of its new parameters."""
    import transformers

    if auto_class in CausalLM.auto_classes.values() and hf.model_type in ENCODERS:
        raise InputError(
            f"model {config.name!r} is a {hf.model_type}, which sees the words to come; "
            f"{CausalLM.name!r} needs a decoder such as GPT-2 or Llama"
        )
    if hasattr(hf, "use_cache"):
        hf.use_cache = False
    hf.chunk_size_feed_forward = 0  # others save memory, of texts of some lengths alone
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    kind = getattr(transformers, auto_class)
    _check_size(config, source, hf, kind)
    if not config.pretrained:
        model = kind.from_config(hf, **options)
        return _finished(config, model), frozenset(name for name, _ in model.named_parameters())
    load = partial(
        kind.from_pretrained, source, config=hf, ignore_mismatched_sizes=True,
        output_loading_info=True, **origin(source, config.revision),
    )  # fmt: skip
    before = torch.get_rng_state()
    as_stored = config.dtype == "bf16" and hf.dtype == torch.bfloat16
    if as_stored:  # mapped from the file: no copy in float32, and one for all processes
        model, info = load(**options | {"dtype": torch.bfloat16})
        has_rounded = any(b.dtype == torch.bfloat16 for b in model.buffers())  # which are exact
        as_stored = not (info["missing_keys"] or info["mismatched_keys"] or has_rounded)
    if not as_stored:
        model = None  # not two at a time
        torch.set_rng_state(before)
        model, info = load(**options)
    used = {_NUMBER.sub(".*.", name) for name in model.state_dict()}
    others = sorted(n for n in info["unexpected_keys"] if _NUMBER.sub(".*.", n) in used)
    if others:
        raise InputError(
            f"{config.name!r} has weights of more layers than its config.json describes, "
            f"{others[0]!r} among others"
        )
    new = {*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}
    of_head = [*(f"{path}.*" for path in find_head(model)), *(f"{one}.*" for one in config.head)]
    head = {name for name in new if any(fnmatchcase(name, pattern) for pattern in of_head)}
    missing = sorted(name for name in new - head if ".pooler." not in f".{name}")
    if missing:
        raise InputError(
            f"{config.name!r} lacks weights of {type(model).__name__}, {missing[0]!r} among "
            f"others; for random weights set model.pretrained to false"
        )
    for name in sorted(head):
        parameter = model.get_parameter(name)
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
        elif name.endswith(".bias"):
            nn.init.zeros_(parameter)
    if broken := not_finite(model.state_dict()):
        raise InputError(
            f"{config.name!r} has weights that are not finite, {broken!r} among others; write or "
            "copy them again"
        )
    return _finished(config, model), frozenset(new)


def _finished(config: ModelConfig, model: Any) -> nn.Module:
    """Set the model's attention, and make its projections nn.Linear."""
    if config.attention == "sdpa":
        attention.give(model)
    return linearise(model)


def _check_size(config: ModelConfig, source: str, hf: Any, auto_class: Any) -> None:
    """Check numbers of layers and parameters, on the meta device, before anything is built."""
    for field, value in hf.to_dict().items():
        if _COUNTS.search(field) and isinstance(value, int | str | float | list):
            for count in value if isinstance(value, list) else [value]:
                if type(count) is not int or not 0 <= count <= _MOST_LAYERS:
                    raise InputError(
                        f"config.json of {config.name!r} has {field} = {brief(value)}; allowed: 0 "
                        f"to {_MOST_LAYERS}"
                    )
    if config.name in BUILTIN:
        return
    with torch.device("meta"):
        count = sum(p.numel() for p in auto_class.from_config(hf).parameters())
    text = f"can't load model {config.name!r}: its config.json describes {count:,} parameters"
    weights = (path for path in Path(source).glob("*") if path.suffix in (".safetensors", ".bin"))
    stored = sum(path.stat().st_size for path in weights)
    if config.pretrained and stored and count > 2 * stored:
        raise InputError(f"{text}, and its files of weights have {stored:,} bytes; they are others")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if 4 * count > memory:
        raise InputError(
            f"{text} of 4 bytes; this machine has a memory of {memory:,} bytes: take a smaller one"
        )


def _image_inputs(config: ModelConfig, source: str, hf: Any) -> ImageInputs:
    """Prepare pictures as the model's image processor does, but crop nothing: whole pictures become
    squares. Set the picture size of a model without weights."""
    processor = _processor(config, source)
    model_sides = getattr(hf, "image_size", None)
    sides = model_sides or processor.get("size") or _SIDE
    if isinstance(sides, dict):
        sides = sides.get("shortest_edge") or (sides["height"], sides["width"])
    if config.image_size is not None:
        patch = getattr(hf, "patch_size", 1)
        if isinstance(patch, int) and config.image_size % patch:
            raise InputError(
                f"model.image_size = {config.image_size} must be a multiple of {patch} for "
                f"{config.name}"
            )
        sides = config.image_size
    size = (sides, sides) if isinstance(sides, int) else (sides[0], sides[1])
    if model_sides is not None and not config.pretrained:
        hf.image_size = model_sides = sides
    return ImageInputs(
        config.name,
        mean=tuple(processor.get("image_mean") or (0.5,)),
        std=tuple(processor.get("image_std") or (0.5,)),
        size=size,
        channels=getattr(hf, "num_channels", 3),
        interpolate=model_sides is not None and model_sides != sides,
    )


def _processor(config: ModelConfig, source: str) -> dict[str, Any]:
    """Return the fields of the model's preprocessor_config.json."""
    from transformers import ImageProcessingMixin

    options = origin(source, config.revision)
    del options["trust_remote_code"]
    try:
        fields, _ = ImageProcessingMixin.get_image_processor_dict(source, **options)
        return dict(fields)
    except OSError as error:
        if not config.pretrained:
            return {}  # any scale does for random weights
        raise InputError(
            f"{config.name!r} has no preprocessor_config.json, which says how pixels are scaled"
        ) from error
