"""Which parameters a method trains: all of them, the task head, or LoRA and the head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import nn

from ..errors import InputError
from ..task.backbone import Backbone
from .lora import add_lora, refuse_dora
from .parts import train_head_and, train_layers

Trainable = Literal["full", "head", "lora"]


def choose_trainable(
    backbone: Backbone,
    trainable: Trainable,
    rank: int,
    lora_alpha: float,
    layers: Sequence[str] = (),
    *,
    dora: bool = False,
) -> nn.Module:
    """Make all parameters, the task head, or LoRA and the head trainable; in place.

    Args:
        backbone: its ``model`` is changed.
        trainable: which of the three.
        rank, lora_alpha: of LoRA, which the projections get; A starts at N(0, 1 / rank),
            B at 0.
        layers: restricts ``full``, as in `train_layers`.
        dora: whether LoRA may be DoRA.

    Raises:
        InputError: there is no head, no recognised block or no such layer, or the rank is too
            large; LoRA is to be DoRA and may not.
    """
    if trainable == "full":
        return train_layers(backbone, layers)
    if layers:
        raise InputError(f"layers goes with trainable = 'full'; trainable is {trainable!r}")
    if trainable == "head" and not backbone.head:
        raise InputError(
            f"model {backbone.name!r} has no recognised task head; name its modules in model.head"
        )
    if trainable == "lora":
        if not dora:
            refuse_dora(backbone)
        add_lora(backbone, rank, lora_alpha)
    return train_head_and(backbone, lambda name: ".lora_" in name)
