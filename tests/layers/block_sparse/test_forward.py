"""A gated forward pass against the plain layer with a weight that is multiplied out."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedtailor.layers.block_sparse.blocks import Blocks
from fedtailor.layers.block_sparse.forward import adapted, select
from fedtailor.layers.block_sparse.layers import GatedConv2d, GatedLinear

KEPT = [
    (True, True, True, True),
    (True, False, True, False),
    (True, False, False, False),
    (False, False, False, True),
    (False, False, False, False),
]


def by_hand(weight: Tensor, gates: list[float], sizes: tuple[int, ...]) -> Tensor:
    flat, start = weight.detach().double().flatten().clone(), 0
    for gate, size in zip(gates, sizes, strict=True):
        flat[start : start + size] *= gate
        start += size
    return flat.view(weight.shape)


def run(
    layer: GatedLinear | GatedConv2d, x: Tensor, kept: tuple[bool, ...] | None, gates: Tensor
) -> list[Tensor]:
    """The output, and the gradients of its weighted sum in x, weight, bias and gates."""
    state = {n: p.detach().clone().requires_grad_() for n, p in layer.named_parameters()}
    x, gates = x.clone().requires_grad_(), gates.clone().requires_grad_()
    blocks = Blocks(("weight",), (layer.sizes,))
    selection = None if kept is None else select(layer, blocks, kept)
    used = adapted(layer, blocks, state, gates, selection)
    y = functional_call(layer, used, (x,))
    direction = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    inputs = [x, *state.values(), gates]
    found = torch.autograd.grad((y * direction).sum(), inputs, materialize_grads=True)
    return [y.detach(), *found]


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("kind", ["linear", "tokens", "conv"])
def test_a_gated_layer_is_the_layer_with_its_weight_multiplied(
    kept: tuple[bool, ...], kind: str
) -> None:
    torch.manual_seed(0)
    sizes = (3, 30, 30, 27)  # pieces of rows, and rows that two blocks share
    base: nn.Module
    if kind == "conv":
        base, x = nn.Conv2d(2, 5, 3, stride=2, padding=1).double(), torch.randn(4, 2, 7, 6).double()
        gated_layer: GatedLinear | GatedConv2d = GatedConv2d(copy.deepcopy(base), sizes)  # type: ignore[arg-type]
    else:
        base, x = nn.Linear(9, 10).double(), torch.randn(4, 9).double()
        x = x if kind == "linear" else torch.randn(2, 3, 9).double()
        gated_layer = GatedLinear(copy.deepcopy(base), sizes)  # type: ignore[arg-type]
    gates = torch.tensor([0.5, 0.2, 0.9, 1.5]).double() * torch.tensor(kept)
    y, *gradients = run(gated_layer, x, kept, gates)
    weight = by_hand(base.weight, gates.tolist(), sizes)  # type: ignore[arg-type]
    plain = copy.deepcopy(base)
    plain.weight.data.copy_(weight)  # type: ignore[union-attr, operator]
    torch.testing.assert_close(y, plain(x))
    dense = run(gated_layer, x, None, gates)
    torch.testing.assert_close(y, dense[0])
    open_blocks = torch.tensor(kept)
    in_weight = by_hand(torch.ones_like(base.weight), open_blocks.tolist(), sizes)  # type: ignore[arg-type]
    for name, found, expected in zip("xwb", gradients, dense[1:], strict=False):
        shown = expected * in_weight if name == "w" else expected
        torch.testing.assert_close(found, shown, msg=name)
    torch.testing.assert_close(gradients[3] * open_blocks, dense[4] * open_blocks)


def test_rows_that_are_dropped_are_not_computed() -> None:
    """The weight's dropped rows could hold anything."""
    layer = GatedConv2d(nn.Conv2d(1, 4, 3, bias=False), (9, 9, 9, 9))
    layer.weight.data[2:] = torch.nan
    y, gx, gw, _ = run(layer, torch.rand(1, 1, 5, 5), (True, True, False, False), torch.ones(4))
    assert y[:, 2:].eq(0).all()
    assert gx.isfinite().all()
    assert gw[2:].eq(0).all()
    wide = GatedLinear(nn.Linear(400, 400, bias=False), (40_000, 120_000))
    wide.weight.data[100:] = torch.nan
    y, gx, gw, _ = run(wide, torch.rand(3, 400), (True, False), torch.ones(2))
    assert y[:, 100:].eq(0).all()
    assert gx.isfinite().all()
    assert gw[100:].eq(0).all()
