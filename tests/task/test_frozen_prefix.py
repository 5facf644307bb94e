"""The frozen part below the first trained layer: where it ends; leaving it out changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fedtailor import random
from fedtailor.layers.parts import train_layers
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedavg_ft import FedAvgFT
from fedtailor.methods.fedprox import FedProx
from fedtailor.methods.local import Local
from fedtailor.params import CACHED, Batch, Params, add_prefix
from fedtailor.task.backbone import Backbone
from fedtailor.task.task import Task
from tests.small import digits_backbone
from tests.text import tiny_bert


def task_of(model: nn.Module, *layers: str) -> Task:
    return Task(Backbone(model), lambda b: train_layers(b, layers))


def with_features(task: Task, batch: Batch) -> Batch:
    return {**batch, **add_prefix(task.features(batch), CACHED)}


def moved(task: Task) -> Params:
    return {n: v + 0.1 * torch.randn_like(v) for n, v in task.state.items()}


class Counted(nn.Linear):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Residual(nn.Module):
    """x + f(g(x)), with another layer before."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.g, self.f = Counted(4, 4), Counted(4, 4), Counted(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return x + self.f(torch.relu(self.g(x)))


class Skip(nn.Module):
    """What the first layer gives is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.middle(x)) + x


class Scaled(nn.Module):
    """A tensor of the whole model scales what the layer ``at`` gives; a part that is never called
    holds the weight of the last layer."""

    def __init__(self, at: int, scale: float = 1.0, *, is_gate: bool = False) -> None:
        super().__init__()
        self.at, self.scale, self.is_gate = at, nn.Parameter(torch.tensor(scale)), is_gate
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), Adapted()])

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number == self.at:
                x = x * ((self.scale > 0) if self.is_gate else self.scale)
        return x


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.adapter = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.adapter.weight


def chain() -> nn.Module:
    return nn.Sequential(Counted(4, 6), nn.ReLU(), Counted(6, 5), nn.ReLU(), nn.Linear(5, 3))


def test_the_layers_below_the_cut_do_not_run_and_nothing_changes() -> None:
    task = task_of(chain(), "4")
    batch = {"input": torch.randn(3, 4)}
    cached = with_features(task, batch)
    assert cached["cached.features"].shape == (3, 5)
    state = moved(task)
    expected = task.logits(state, batch)
    layers = [m for m in task.model.modules() if isinstance(m, Counted)]
    before = [m.calls for m in layers]
    assert task.logits(state, cached).equal(expected)
    assert [m.calls for m in layers] == before
    task.logits(state, batch)
    assert [m.calls for m in layers] == [calls + 1 for calls in before]


def test_gradients_are_the_same_from_the_features() -> None:
    task = task_of(chain(), "2", "4")
    batch = {"input": torch.randn(3, 4), "labels": torch.tensor([0, 1, 2])}
    state, key = moved(task), random.key(0)
    both = [with_features(task, batch), batch]
    of = torch.func.grad(lambda w, b: task.loss(w, b, key)[0])
    features, whole = (of(state, b) for b in both)
    assert all(features[n].equal(whole[n]) for n in state)


def test_several_clients_at_once() -> None:
    task = task_of(chain(), "4")
    batches = [{"input": torch.randn(3, 4)} for _ in range(2)]
    both = [with_features(task, batch) for batch in batches]
    stacked = {n: torch.stack([b[n] for b in both]) for n in both[0]}
    got = torch.func.vmap(task.logits, in_dims=(None, 0))(task.state, stacked)
    for at, batch in enumerate(batches):
        torch.testing.assert_close(got[at], task.logits(task.state, batch))


def test_a_cut_inside_a_residual_branch_moves_out_to_where_it_is_right() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.below, self.block = Counted(4, 4), Residual()

        def forward(self, x: Tensor) -> Tensor:
            return self.block(self.below(x))

    task = task_of(Net(), "block.f")  # what f takes lacks the sum's other term
    batch = {"x": torch.randn(3, 4)}
    assert task.logits(moved(task), with_features(task, batch)).shape == (3, 4)
    task.features(batch)
    assert task.prefix is not None
    assert task.prefix.boundary == "block"
    assert task.prefix.skipped == ("below",)


@pytest.mark.parametrize(
    ("model", "boundary"),
    [
        (Scaled(2), "layers.2"),
        (Scaled(1), None),
        (Scaled(0), None),
        (Scaled(1, scale=1e6), None),  # a small change would be lost in rounding
        (Scaled(1, is_gate=True), None),  # and would not get beyond the threshold
    ],
)
def test_a_trained_tensor_of_the_whole_model_counts_where_it_is_read(
    model: Scaled, boundary: str | None
) -> None:
    def adapt(backbone: Backbone) -> nn.Module:
        for name, parameter in backbone.model.named_parameters():
            parameter.requires_grad_(name in ("scale", "layers.2.adapter.weight"))
        return backbone.model

    task, batch = Task(Backbone(model), adapt), {"x": torch.randn(3, 4)}
    cached = with_features(task, batch)
    assert task.prefix is not None
    assert task.prefix.boundary == boundary
    state = moved(task)
    assert task.logits(state, cached).equal(task.logits(state, batch))


@pytest.mark.parametrize(
    ("model", "layers"),
    [
        (Skip, ("last",)),  # used in two places
        (chain, ()),  # nothing is frozen
        (chain, ("0",)),  # nothing frozen comes first
        (Residual, ("f",)),
    ],
)
def test_nothing_is_left_out_where_it_would_change_something(
    model: Callable[[], nn.Module], layers: tuple[str, ...]
) -> None:
    task = task_of(model(), *layers)
    batch = {next(iter(_arguments(task.model))): torch.randn(3, 4)}
    expected = task.logits(task.state, batch)
    assert task.features(batch) == {}
    assert task.logits(task.state, batch).equal(expected)


def _arguments(model: nn.Module) -> list[str]:
    return ["input"] if isinstance(model, nn.Sequential) else ["x"]


def test_a_trained_tensor_that_starts_at_zero_hides_no_mistake() -> None:
    model = Skip()
    nn.init.zeros_(model.last.weight)  # what goes through it can't be seen
    assert task_of(model, "last").features({"x": torch.randn(3, 4)}) == {}


def test_dropout_below_is_drawn_anew_in_every_step() -> None:
    batch = {"pixel_values": torch.rand(3, 1, 8, 8)}
    for dropout, found in ((0.2, {}), (0.0, {"features"})):
        task = Task(digits_backbone(dropout), lambda b: train_layers(b, ("head",)))
        assert task.features(batch).keys() == set(found)


@pytest.mark.parametrize("kind", [FedAvg, FedAvgFT, FedProx, Local])
def test_every_baseline_leaves_out_what_it_does_not_train(kind: type[FedAvg]) -> None:
    method = kind(trainable="head")
    task = Task(digits_backbone(0.0), method.adapt)
    batch = {"pixel_values": torch.rand(3, 1, 8, 8)}
    cached = {**batch, **add_prefix(method.precompute(task, batch), CACHED)}
    assert cached["cached.features"].shape == (3, 16)
    state = moved(task)
    assert method.predict(task, state, cached).equal(task.logits(state, batch))


def test_norms_alone_are_not_worth_a_cut() -> None:
    method = FedAvg(trainable="lora")  # trains from the first block on
    backbone = tiny_bert()
    for module in backbone.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    task = Task(backbone, method.adapt)
    assert (
        method.precompute(
            task, {"input_ids": torch.ones(2, 4).long(), "attention_mask": torch.ones(2, 4)}
        )
        == {}
    )


def test_a_transformer_starts_at_its_first_trained_layer() -> None:
    backbone = tiny_bert()
    for module in backbone.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    task = Task(backbone, lambda b: train_layers(b, ("*.layer.1", "bert.pooler", "classifier")))
    ids, mask = torch.randint(0, 1000, (2, 7)), torch.ones(2, 7)
    mask[1, 4:] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    cached = with_features(task, batch)
    assert cached["cached.features"].shape == (2, 7, 32)
    state = moved(task)
    assert task.logits(state, cached).equal(task.logits(state, batch))
    assert task.prefix is not None
    assert task.prefix.boundary == "bert.encoder.layer.1.attention"
