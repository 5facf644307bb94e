"""The fields of an experiment's ``[model]`` section."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt


@dataclass(frozen=True)
class ModelConfig:
    """Which model, and how its outputs become logits."""

    name: str = "minilm"  # built-in, Hugging Face hub name, or local path
    pretrained: bool = True  # False: the architecture with random weights
    pooling: Literal["mean", "native"] | None = None  # text classification; None: the built-in's
    targets: tuple[str, ...] = ()  # patterns of the projections to adapt; (): found by model type
    head: tuple[str, ...] = ()  # patterns of the task head's modules; (): found
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0  # in training, everywhere the model has it
    image_size: Annotated[int, Gt(0)] | None = None  # None: the model's own
