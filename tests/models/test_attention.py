"""Fused attention gives the numbers of plain products, and their derivatives, under vmap too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from fedtailor.models import ModelConfig
from fedtailor.models import load_model as load
from fedtailor.models.attention import NAME, attention, causal_mask
from tests.models.small import (
    DECODERS,
    ENCODERS,
    IMAGE,
    PICTURES,
    ROTARY,
    SEQUENCE,
    call,
    save,
    texts,
    three_classes,
)

OWN = {"deberta-v2", "mpnet", "falcon", "convnext", "convnextv2"}  # their code has its attention


def models(folder: Path, name: str) -> dict[str, Any]:
    """The same tiny model with fused and with eager attention."""
    config = {**ENCODERS, **DECODERS, **ROTARY, **PICTURES}[name]
    auto, modality = (IMAGE, "image") if name in PICTURES else (SEQUENCE, "text")
    save(folder, three_classes(config), auto)
    return {
        attention: load(
            ModelConfig(str(folder), attention=attention),  # type: ignore[arg-type]
            "classification", 3, 0, modality,  # type: ignore[arg-type]
        )
        for attention in ("sdpa", "eager")
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of vmap, by Swin's pooling
@pytest.mark.parametrize("name", [*ENCODERS, *DECODERS, *ROTARY, *PICTURES])
def test_every_architecture_gives_the_numbers_of_eager_attention(tmp_path: Path, name: str) -> None:
    both = models(tmp_path, name)
    used = {
        module.config._attn_implementation
        for module in both["sdpa"].model.modules()
        if hasattr(module, "config")
    }
    assert (NAME in used) == (name not in OWN)
    batches = {"pixel_values": torch.rand(3, 2, 1, 16, 16)} if name in PICTURES else texts(3)
    found = {}
    for attention_name, backbone in both.items():
        state = {n: p.detach() for n, p in backbone.model.named_parameters()}

        def loss(state: dict[str, Tensor], batch: dict[str, Tensor], of: Any = backbone) -> Any:
            return call(of, batch, state).log_softmax(-1)[..., 1].sum()

        found[attention_name] = vmap(grad(loss), in_dims=(None, 0))(state, batches)
    for parameter, expected in found["eager"].items():
        torch.testing.assert_close(found["sdpa"][parameter], expected, atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("causal", [False, True])
def test_several_heads_share_keys_and_second_derivatives_are_right(causal: bool) -> None:
    drawn = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 5, 8, generator=drawn, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, 7, 8, generator=drawn, dtype=torch.float64)
    mask = torch.zeros(2, 1, 5, 7, dtype=torch.float64)
    mask[1, :, :, 4:] = -1e9
    if causal:
        key, value = key[:, :, :5], value[:, :, :5]
        mask = torch.full((5, 5), -torch.inf, dtype=torch.float64).triu(1)

    def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(2, 1) for x in (key, value))
        return ((query @ k.mT * 8**-0.5 + mask).softmax(-1) @ v).transpose(1, 2)

    def fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        told = causal_mask(query) if causal else mask
        return attention(torch.nn.Identity(), query, key, value, told)[0]

    def curvature(function: Any) -> tuple[Tensor, ...]:
        def first(*inputs: Tensor) -> Tensor:
            return sum(g.sin().sum() for g in grad(energy, (0, 1, 2))(*inputs))  # type: ignore[return-value]

        def energy(*inputs: Tensor) -> Tensor:
            return function(*inputs).pow(3).sum()

        second: tuple[Tensor, ...] = grad(first, (0, 1, 2))(query, key, value)
        return second

    torch.testing.assert_close(fused(query, key, value), plain(query, key, value))
    for found, expected in zip(curvature(fused), curvature(plain), strict=True):
        torch.testing.assert_close(found, expected)
