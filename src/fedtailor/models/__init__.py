"""Pretrained models, and the parts of them that methods adapt."""

from .blocks import PROJECTIONS, find_blocks, find_head
from .config import ModelConfig
from .linear import linearise
from .load import from_module, load_model, load_tokenizer
from .packages import BUILTIN, Builtin

__all__ = [
    "BUILTIN",
    "PROJECTIONS",
    "Builtin",
    "ModelConfig",
    "find_blocks",
    "find_head",
    "from_module",
    "linearise",
    "load_model",
    "load_tokenizer",
]
