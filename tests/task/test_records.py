"""Clipped gradients of single examples and their noise, against a loop over examples."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fedtailor import random
from fedtailor.errors import InputError
from fedtailor.methods.fedavg import FedAvg
from fedtailor.optim import ClientContext, Optimiser, train
from fedtailor.params import DRAWN, Batch, Params, flat, subtract
from fedtailor.task.backbone import Backbone
from fedtailor.task.records import RecordNoise, SampledBatch
from fedtailor.task.task import Task

SIZE = 3.2  # of a batch, on average
DRAW = torch.Generator().manual_seed(0)
BATCHES: list[Batch] = [
    {
        "x": torch.randn(count, 6, generator=DRAW) * 3,
        "labels": torch.randint(4, (count,), generator=DRAW),
        DRAWN: torch.tensor([float(count != 1)] * count),
    }
    for count in (5, 1, 2)  # one was drawn empty
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(6, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.tanh(self.hidden(x)))
        return y


def task(method: FedAvg) -> Task:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = Net()
    return Task(Backbone(net, blocks=(("hidden",),), head=("head",), name="net"), method.adapt)


def context(clip: float, std: float = 0.0, rows: int | None = None, size: float = SIZE) -> Any:
    noise = RecordNoise(random.key(3), torch.tensor(size, dtype=torch.float64), clip, std)
    return ClientContext(random.key(1), micro_batch=rows, noise=noise)


def sampled(batches: list[Batch] = BATCHES, uses: int = 1) -> list[Batch]:
    return [SampledBatch(batch, at, uses) for at, batch in enumerate(batches)]


def by_a_loop(method: FedAvg, start: Params, clip: float) -> Params:
    """One step of SGD a batch, example by example, by ordinary autograd."""
    model = task(method).model
    theta = {name: value.clone() for name, value in start.items()}
    for batch in BATCHES:
        sums = {name: torch.zeros_like(value) for name, value in theta.items()}
        for x, label, drawn in zip(batch["x"], batch["labels"], batch[DRAWN], strict=True):
            leaves = {name: value.clone().requires_grad_() for name, value in theta.items()}
            loss = F.cross_entropy(functional_call(model, leaves, (x[None],)), label[None])
            slopes = torch.autograd.grad(loss, list(leaves.values()))
            length = math.sqrt(sum(float(g.square().sum()) for g in slopes))
            for name, g in zip(leaves, slopes, strict=True):
                sums[name] += g * min(1.0, clip / length) * drawn
        theta = {name: value - 0.1 * sums[name] / SIZE for name, value in theta.items()}
    return theta


@pytest.mark.parametrize("trainable", ["full", "head", "lora"])
@pytest.mark.parametrize("clip", [0.7, 1e9])
def test_it_is_a_loop_over_examples(trainable: Any, clip: float) -> None:
    """Of all tensors that are trained, and of no others: LoRA's factors where these are."""
    method = FedAvg(trainable=trainable, rank=2, optimiser=Optimiser(lr=0.1))
    one = task(method)
    start = {n: v + 0.1 if "lora_B" in n else v for n, v in one.state.items()}
    assert "hidden.base_layer.weight" not in start
    expected = by_a_loop(method, start, clip)
    for rows in (None, 2):
        made, loss = method.local(one, start, sampled(), context(clip, rows=rows))
        for name in one.trained:
            torch.testing.assert_close(made[name], expected[name], rtol=1e-4, atol=1e-6)
            assert not made[name].equal(start[name])
    assert loss > 0


def test_with_room_for_every_gradient_and_no_noise_it_is_plain_training() -> None:
    method = FedAvg(optimiser=Optimiser("adam", lr=1e-2, eps=1e-3))
    batches = [{**BATCHES[0], DRAWN: torch.ones(5)}] * 3
    one, noised = task(method), context(1e9, size=5)
    plain, loss = method.local(one, one.state, batches, noised._replace(noise=None))
    made, same = method.local(one, one.state, sampled(batches), noised)
    assert float(loss) == pytest.approx(float(same), rel=1e-5)
    for name, value in plain.items():
        torch.testing.assert_close(made[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value", [1e30, math.inf, math.nan])
def test_an_example_moves_a_step_by_no_more_than_the_clip(value: float) -> None:
    """Whatever it is; the noise is the same with it and without it."""
    method = FedAvg(optimiser=Optimiser(lr=1.0))
    wild = {**BATCHES[0], "x": BATCHES[0]["x"].clone()}
    wild["x"][2] = value
    without = {**wild, DRAWN: torch.tensor([1.0, 1, 0, 1, 1])}
    usual = {**BATCHES[0]}
    made = [
        method.local(task(method), task(method).state, sampled([batch]), context(0.4, 0.3))
        for batch in (without, wild, usual)
    ]
    ends, losses = [end for end, _ in made], [float(loss) for _, loss in made]
    assert math.isfinite(losses[1])
    assert math.isfinite(value) or losses[1] == pytest.approx(losses[0] * 4 / 5)
    for end in ends[1:]:
        assert float(flat(subtract(end, ends[0])).norm()) <= 0.4 / SIZE * (1 + 1e-5)
    assert float(flat(subtract(ends[2], ends[0])).norm()) > 0.2 / SIZE


@pytest.mark.slow
def test_a_batch_that_was_drawn_empty_is_a_step_of_noise_alone() -> None:
    method, steps = FedAvg(optimiser=Optimiser(lr=1.0)), 30
    one = task(method)
    batches = sampled([BATCHES[1]] * steps, uses=2)
    moves, state = [], one.state
    for batch in [*batches, *batches]:
        after, _ = method.local(one, state, [batch], context(0.4, 0.3))
        moves.append(flat(subtract(after, state)))
        state = after
    draws = torch.stack(moves) * SIZE / 0.3  # [s, P]
    assert float(draws.std()) == pytest.approx(1, abs=0.05)
    assert abs(float(draws.mean())) < 0.07
    alike = draws @ draws.T / draws.shape[1]  # a draw for every step, also on the same batch
    assert float(alike.fill_diagonal_(0).abs().max()) < 0.8


def test_examples_can_be_used_in_counted_steps_alone() -> None:
    method = FedAvg()
    one, batches = task(method), sampled(uses=2)
    told = context(1.0)
    for _ in range(2):
        train(one, one.state, batches, told, Optimiser())
    with pytest.raises(InputError, match="more steps on a batch than the 2 that are counted"):
        train(one, one.state, batches, told, Optimiser())
    for look in (lambda b: b["labels"], dict, lambda b: {**b}, lambda b: b.get("x"), len_of):
        with pytest.raises(InputError, match="uses examples beside the gradients of its steps"):
            look(sampled()[0])
    with pytest.raises(InputError, match="examples that are not those of a sampled batch"):
        train(one, one.state, BATCHES, told, Optimiser())


def len_of(batch: Batch) -> int:
    return len(next(iter(batch.values())))


def test_what_a_step_keeps_of_its_batch_is_refused() -> None:
    def loss(state: Params, batch: Batch, key: Tensor) -> tuple[Tensor, Params]:
        return state["head.bias"].sum(), {"mean": batch["x"].mean()}

    one = task(FedAvg())
    with pytest.raises(InputError, match="keeps statistics of its batches"):
        train(one, one.state, sampled(), context(1.0), Optimiser(), loss=loss)
