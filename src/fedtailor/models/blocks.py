"""The parts of a model that methods adapt: its blocks' projections and its task head.

A *block* is a transformer block: an attention and a feed-forward network. It is listed as the paths
of its projections, linear layers that LoRA can adapt.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from ..errors import InputError
from ..layers.parts import patterns_of

ALL_LINEAR = "all-linear"  # PEFT's word
_NUMBER = re.compile(r"\.[0-9]+\.")
_LIKE_BERT = ("bert", "roberta", "xlm-roberta", "electra", "deberta-v2")
_LIKE_LLAMA = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo", "olmo2",
)  # fmt: skip

PROJECTIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_LIKE_BERT, ("layer.#.attention.output.dense", "layer.#.output.dense")),
    "mpnet": ("layer.#.attention.attn.o", "layer.#.output.dense"),
    "distilbert": ("layer.#.attention.out_lin", "layer.#.ffn.lin2"),
    "modernbert": ("layers.#.attn.Wo", "layers.#.mlp.Wo"),
    "t5": ("block.#.layer.#.SelfAttention.o", "block.#.layer.#.DenseReluDense.wo"),
    "bart": ("layers.#.self_attn.out_proj", "layers.#.fc2"),
    "gpt2": ("h.#.attn.c_proj", "h.#.mlp.c_proj"),
    **dict.fromkeys(_LIKE_LLAMA, ("layers.#.self_attn.o_proj", "layers.#.mlp.down_proj")),
    "phi": ("layers.#.self_attn.dense", "layers.#.mlp.fc2"),
    "falcon": ("h.#.self_attention.dense", "h.#.mlp.dense_4h_to_h"),
    "vit": ("layers.#.attention.o_proj", "layers.#.mlp.fc2"),
    "dinov2": (  # the second before transformers 5.18
        "layer.#.attention.o_proj",
        "layer.#.attention.output.dense",
        "layer.#.mlp.fc2",
    ),
    "swin": ("blocks.#.attention.o_proj", "blocks.#.mlp.fc2"),
    **dict.fromkeys(("convnext", "convnextv2"), ("layers.#.pwconv1", "layers.#.pwconv2")),
}
"""For each model type, how the paths of a block's attention output and feed-forward output end; the
first number is the block's. ConvNeXt has no attention: these are its two pointwise layers."""

_HEADS = (
    "classifier", "pre_classifier", "classification_head", "score", "head", "fc", "_fc",
    "qa_outputs",
)  # fmt: skip


def find_blocks(model: nn.Module, targets: Sequence[str] = ()) -> tuple[tuple[str, ...], ...]:
    """Find the paths of the adaptable projections, block by block.

    ``targets`` are patterns of the paths of ``nn.Linear`` modules, where ``*`` stands for anything,
    dots too. Paths that agree up to their first number are one block; a path without a number is a
    block by itself. ``all-linear`` stands for all in numbered layers but a task head's. Without
    targets, they are those of the model's type in ``PROJECTIONS``, also of a wrapped model; none if
    that isn't known. Raises InputError where a pattern matches no linear layer's path.

    >>> mlp = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> find_blocks(mlp, ["*"])
    (('0',), ('2',))
    """
    if targets:
        linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        if ALL_LINEAR in targets:
            head = tuple(f"{path}." for path in find_head(model))
            body = [name for name in linear if not f"{name}.".startswith(head)]
            others = [pattern for pattern in targets if pattern != ALL_LINEAR]
            targets = [*(name for name in body if _NUMBER.search(f".{name}.")), *others]
        found = [(_block(path), path) for path in _match(linear, targets, "targets")]
    else:
        ends = [_pattern(end) for end in PROJECTIONS.get(model_type(model), ())]
        ways = ((path, end.fullmatch(path)) for path, _ in model.named_modules() for end in ends)
        found = [(match[1], path) for path, match in ways if match is not None]
    blocks: dict[str, list[str]] = {}
    for block, path in found:
        blocks.setdefault(block, []).append(path)
    return tuple(map(tuple, blocks.values()))


def find_head(model: nn.Module, patterns: Sequence[str] = ()) -> tuple[str, ...]:
    """Find the paths of the task head's modules.

    Without ``patterns``, which are as for `find_blocks`, these are the modules directly below
    ``model`` that have a usual name (``classifier``, ``score``, ``head``, ...). A language model's
    output layer is no head: it is as large as the vocabulary. Of modules inside each other the
    outermost counts. Raises InputError where a pattern matches no module's path.

    >>> model = nn.ModuleDict({"body": nn.Linear(4, 3), "classifier": nn.Linear(3, 2)})
    >>> find_head(model)
    ('classifier',)
    """
    owners = [name for name, one in model.named_modules() if name and [*one.parameters()]]
    if patterns:
        paths = _match(owners, patterns, "head")
        return tuple(p for p in paths if not any(p.startswith(f"{q}.") for q in paths))
    return tuple(name for name in _HEADS if name in owners)


def model_type(model: nn.Module) -> str:
    """Return Hugging Face's name of the architecture of ``model``, or of a module inside it; ""
    without any."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    return next((str(c.model_type) for c in configs if c and hasattr(c, "model_type")), "")


def _pattern(end: str) -> re.Pattern[str]:
    """What matches a whole path that ends so; its group is the block."""
    name, rest = end.split(".#.", 1)
    return re.compile(rf"((?:.+\.)?{name}\.\d+)\." + re.escape(rest).replace(r"\#", r"\d+"))


def _match(paths: Sequence[str], patterns: Sequence[str], field: str) -> list[str]:
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in paths):
            if field == "head":
                paths = sorted(paths, key=lambda path: path.count("."))  # the outermost first
            raise InputError(
                f"model.{field} {pattern!r} matches nothing in the model; "
                f"candidates: {patterns_of(paths) or 'none'}"
            )
    return [path for path in paths if any(fnmatchcase(path, pattern) for pattern in patterns)]


def _block(path: str) -> str:
    """The path up to its first number."""
    parts = path.split(".")
    end = next((i + 1 for i, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[:end])
