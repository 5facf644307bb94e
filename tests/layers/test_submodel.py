"""Which axes can be cut, and that a cut network is the whole one with those units masked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from fedtailor import random
from fedtailor.layers.parts import train_layers
from fedtailor.layers.submodel import Group, find_groups, kept_units, pad_to_full, slice_submodel
from fedtailor.models.cnn import cnn, lenet, resnet9
from fedtailor.models.inputs import TextInputs
from fedtailor.models.load import from_module
from fedtailor.objectives import CausalLM
from fedtailor.params import Batch, Params
from fedtailor.task.backbone import Backbone
from fedtailor.task.task import Task
from tests.small import digits_backbone
from tests.text import tiny_bert


def pictures(*shape: int) -> Batch:
    return {"pixel_values": random.uniform(random.key("pictures"), (3, *shape))}


def texts() -> Batch:
    ids = torch.arange(12).view(2, 6)
    return {"input_ids": ids, "attention_mask": torch.ones(2, 6)}


def seeded(build: Callable[[], nn.Module]) -> Backbone:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return from_module(build())


def gated() -> Backbone:
    """A decoder whose feed-forward multiplies two projections."""
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=4, attn_implementation="eager",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    return Backbone(model, CausalLM(), TextInputs.of("tiny", config, pooled=False))


MODELS: dict[str, tuple[Callable[[], Backbone], Batch, list[int]]] = {
    "digits": (digits_backbone, pictures(1, 8, 8), [6, 16]),
    "bert": (tiny_bert, texts(), [48, 48, 32]),
    "llama": (gated, texts(), [24]),
    "cnn, oblong": (
        lambda: seeded(lambda: cnn((1, 20, 40), 10, 0.25)), pictures(1, 20, 40), [8, 16, 512],
    ),
    "lenet": (
        lambda: seeded(lambda: lenet((3, 32, 32), 10, 0.25)), pictures(3, 32, 32), [8, 16, 30, 21],
    ),
    "resnet9": (
        lambda: seeded(lambda: resnet9((3, 16, 16), 10, 0.1)), pictures(3, 16, 16),
        [6, 13, 13, 26, 51, 51],
    ),
}  # fmt: skip


def moved(state: Params) -> Params:
    """``state`` with no two units alike; variances stay positive."""
    return {
        name: value + 0.1 * random.normal(random.key(name), tuple(value.shape)).abs()
        for name, value in state.items()
    }


def masked(state: Params, groups: tuple[Group, ...], kept: list[int]) -> Params:
    """The whole network whose layers ignore the units that a cut one hasn't got."""
    ignoring = dict(state)
    for group, units in zip(groups, kept, strict=True):
        for name, axis, block in group.cuts:
            if axis == 1:
                ignoring[name] = ignoring[name].clone()
                ignoring[name][:, units * block :] = 0
    return ignoring


@pytest.mark.parametrize("name", MODELS)
def test_a_cut_network_is_the_whole_one_with_units_masked(name: str) -> None:
    build, batch, sizes = MODELS[name]
    task = Task(build())
    state = moved(task.state)
    groups = find_groups(task)
    assert [group.size for group in groups] == sizes
    for width in (0.5, 0.2, 0.001):
        kept = [group.kept(width) for group in groups]
        cut = slice_submodel(state, groups, kept)
        assert kept_units(cut, groups) == kept
        assert sum(v.numel() for v in cut.values()) < sum(v.numel() for v in state.values())
        whole = task.logits(masked(state, groups, kept), batch)
        assert not torch.allclose(whole, task.logits(state, batch), atol=1e-3)
        torch.testing.assert_close(task.logits(cut, batch), whole, atol=1e-5, rtol=1e-4)


def test_a_residual_sum_cuts_its_layers_together() -> None:
    task = Task(MODELS["resnet9"][0]())
    together = [group.outputs for group in find_groups(task) if len(group.outputs) > 1]
    assert together == [
        ("conv1.conv.weight", "residual1.branch.conv2.conv.weight"),
        ("conv3.conv.weight", "residual2.branch.conv2.conv.weight"),
    ]


def test_a_flattened_map_is_cut_in_blocks_of_a_channel() -> None:
    conv, hidden = find_groups(Task(digits_backbone()))
    assert ("hidden.weight", 1, 9) in conv.cuts
    assert {name for name, _, _ in conv.cuts} == {
        "conv.weight", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var",
        "hidden.weight",
    }  # fmt: skip
    assert hidden.cuts == (("hidden.weight", 0, 1), ("hidden.bias", 0, 1), ("head.weight", 1, 1))


class Net(nn.Module):
    """Two layers, and something in between."""

    def __init__(self, between: Callable[[Tensor], Tensor], d: int = 8, width: int = 8) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, width), nn.Linear(d, 2)
        self.side = nn.Linear(4, 8)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.between(self.first(x)))
        return y


def concatenated(net: Net) -> Net:
    net.forward = lambda x: net.last(torch.cat([net.first(x), net.side(x)], -1))  # type: ignore[method-assign]
    return net


def sizes(net: nn.Module) -> list[int]:
    return [group.size for group in find_groups(Task(from_module(net)))]


def test_what_mixes_or_fixes_channels_is_not_cut() -> None:
    assert sizes(Net(torch.relu)) == [8]
    assert sizes(Net(nn.LayerNorm(8))) == []  # knows its shape
    assert sizes(Net(lambda z: z.softmax(-1))) == []  # all channels depend on all
    assert sizes(Net(lambda z: z.flip(-1))) == []  # not in order
    assert sizes(Net(lambda z: z.view(-1, 2, 4).flatten(1))) == []  # a fixed shape
    assert sizes(Net(lambda z: z[..., :4] * z[..., 4:], d=4)) == []  # two halves as one
    assert sizes(Net(lambda z: z * torch.ones(8))) == []
    assert sizes(concatenated(Net(torch.relu, d=16))) == []
    assert sizes(nn.Sequential(nn.Linear(4, 2))) == []
    grouped = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 2, 3))
    assert sizes(grouped) == []
    twice = nn.Linear(4, 4)
    assert sizes(nn.Sequential(twice, nn.ReLU(), twice, nn.ReLU(), nn.Linear(4, 2))) == []


def test_what_is_frozen_or_shared_is_not_cut() -> None:
    def upper(backbone: Backbone) -> nn.Module:
        return train_layers(backbone, ("hidden", "head"))

    (group,) = find_groups(Task(digits_backbone(), upper))
    assert group.outputs == ("hidden.weight", "hidden.bias")
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    assert sizes(net) == [4, 4]
    net[2].weight = net[0].weight
    assert sizes(net) == []


def test_the_search_leaves_the_model_as_it_was() -> None:
    task, batch = Task(digits_backbone()), pictures(1, 8, 8)
    before = task.logits(task.state, batch)
    assert find_groups(task) is find_groups(task)
    assert task.logits(task.state, batch).equal(before)
    assert all("forward" not in vars(module) for module in task.model.modules())
    upper = Task(digits_backbone(0.0), lambda backbone: train_layers(backbone, ("head",)))
    features = upper.features(batch)["features"]  # puts forwards of its own in place
    assert find_groups(upper) == ()
    given = {**batch, "cached.features": features}
    torch.testing.assert_close(upper.logits(upper.state, given), before)


def test_a_model_that_takes_no_made_up_batch_is_not_cut() -> None:
    class Two(Net):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(a + b)

    assert find_groups(Task(Backbone(Two(torch.relu)))) == ()


def test_widened_is_narrowed_undone() -> None:
    task = Task(digits_backbone())
    groups = find_groups(task)
    cut = slice_submodel(task.state, groups, [3, 5])
    full = pad_to_full(cut, task.state)
    assert {n: v.shape for n, v in full.items()} == {n: v.shape for n, v in task.state.items()}
    assert full["hidden.weight"][:5, :27].equal(task.state["hidden.weight"][:5, :27])
    assert full["hidden.weight"].count_nonzero() == 5 * 27
    again = slice_submodel(full, groups, [3, 5])
    assert all(again[name].equal(cut[name]) for name in cut)
