"""Gated weights, and which layers are replaced."""

import torch
from torch import nn
from torch.nn import functional as F

from fedtailor.layers.block_sparse.blocks import Blocks
from fedtailor.layers.block_sparse.layers import GatedConv2d, GatedLinear, gate_rows, gated


def test_a_layer_without_gates_is_an_ordinary_one() -> None:
    base = nn.Linear(3, 2)
    x = torch.rand(4, 3)
    assert GatedLinear(base, (6,))(x).equal(base(x))


def test_a_block_is_multiplied_by_its_gate() -> None:
    values = torch.arange(5.0)
    assert gated(values, torch.tensor([2.0, 0.0]), (2, 3)).tolist() == [0, 2, 0, 0, 0]


def test_only_layers_that_can_leave_rows_out_are_replaced() -> None:
    tied = nn.Linear(4, 4)
    other = nn.Linear(4, 4)
    other.weight = tied.weight
    model = nn.ModuleDict({
        "linear": nn.Linear(4, 4),
        "conv": nn.Conv2d(2, 2, 3),
        "grouped": nn.Conv2d(2, 2, 3, groups=2),
        "reflected": nn.Conv2d(2, 2, 3, padding_mode="reflect", padding=1),
        "same": nn.Conv2d(2, 2, 3, padding="same"),
        "tied": tied,
        "other": other,
        "attention": nn.MultiheadAttention(4, 2),
    })  # fmt: skip
    before = dict(model.named_parameters())
    gate_rows(model, Blocks(tuple(before), tuple((p.numel(),) for p in before.values())))
    replaced = {n for n, m in model.named_modules() if isinstance(m, GatedLinear | GatedConv2d)}
    assert replaced == {"linear", "conv"}
    assert dict(model.named_parameters()) == before
    x = torch.rand(1, 2, 5, 5)
    assert model["conv"](x).equal(F.conv2d(x, before["conv.weight"], before["conv.bias"]))
