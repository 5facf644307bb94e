"""Frozen weights of 4 and 8 bits."""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import grad, vmap
from torch.nn import functional as F

from fedtailor.errors import InputError
from fedtailor.methods import METHODS, FedAvg, FedMask
from fedtailor.models import ModelConfig, load_model
from fedtailor.task.quantised import _NF4, Form, QuantisedLinear, num_parameters, quantised
from fedtailor.task.task import Task
from tests import kinds

FORMS: tuple[Form, ...] = ("int8", "nf4")


def _linear(seed: int = 0) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(90, 41)  # no whole number of blocks


def test_the_16_numbers_are_quantiles_of_the_normal_distribution() -> None:
    """Half a step off the ends, as QLoRA's code has it: 8 steps up from 0, and 7 down."""
    end, of = 1 - (1 / 32 + 1 / 30) / 2, NormalDist().inv_cdf
    up = [of(p) for p in np.linspace(end, 0.5, 9)[:-1]]
    down = [-of(p) for p in np.linspace(end, 0.5, 8)[:-1]]
    levels = np.array(sorted([*up, 0.0, *down])) / max(up)
    np.testing.assert_allclose(levels, _NF4, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_each_weight_is_the_nearest_that_its_block_has(form: Form) -> None:
    linear = _linear()
    layer = QuantisedLinear(linear, form)
    levels = np.arange(-127, 128) / 127 if form == "int8" else np.array(_NF4)
    flat = linear.weight.detach().numpy().flatten()
    expected = []
    for start in range(0, len(flat), 64):
        block = flat[start : start + 64]
        scale = np.abs(block).max()
        nearest = np.abs(block[:, None] / scale - levels).argmin(1)
        expected.append(levels[nearest] * scale)
    np.testing.assert_allclose(layer.weight.numpy().flatten(), np.concatenate(expected), rtol=1e-5)
    stored = [*layer.buffers(), layer.scales]
    size = sum(x.numel() * x.element_size() for x in stored) / (4 * linear.weight.numel())
    assert size <= (0.30 if form == "int8" else 0.16)


@pytest.mark.parametrize("form", FORMS)
def test_a_product_and_its_gradient_are_those_of_the_weights(form: Form) -> None:
    layer = QuantisedLinear(_linear(), form)
    W, b = layer.weight, layer.bias
    x, kept = torch.randn(3, 5, 90), list[torch.Size]()

    def keep(value: Any) -> Any:
        kept.append(value.shape)
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        layer(x.requires_grad_()).square().sum()
    assert W.shape not in kept
    ours, plain = (
        vmap(grad(lambda x, f=f: f(x).square().sum()))(x.detach())
        for f in (layer, lambda x: F.linear(x, W, b))
    )
    torch.testing.assert_close(ours, plain)
    second, expected = (
        grad(lambda x, f=f: grad(lambda x: f(x).pow(3).sum())(x).sum())(x[0].detach())
        for f in (layer, lambda x: F.linear(x, W, b))
    )
    torch.testing.assert_close(second, expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


def test_methods_that_train_the_weights_are_refused_by_name() -> None:
    data = kinds.data("causal-lm")
    model = ModelConfig(kinds.model("causal-lm"), quantise="nf4")
    backbone = load_model(model, data.objective, 0, 0)
    plain = kinds.backbone("causal-lm").model
    assert num_parameters(backbone.model) == num_parameters(plain)
    assert len(quantised(backbone.model)) == 14  # of two blocks; neither embeddings nor lm_head
    for method in (FedAvg(), FedMask(), METHODS["pfedgate"](), METHODS["heterofl"]()):
        with pytest.raises(InputError, match=r"model.quantise = 'nf4'.*trainable = 'lora'"):
            Task(backbone, method.adapt)
    task = Task(backbone, FedAvg(trainable="lora").adapt)
    assert all(".lora_" in name for name in task.trained)
