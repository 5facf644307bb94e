"""Local training: what a step moves, and what it leaves alone."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtailor import random
from fedtailor.data.config import LocalConfig
from fedtailor.engine.config import EngineConfig
from fedtailor.method import Method
from fedtailor.methods.ditto import Ditto
from fedtailor.methods.fedala import FedALA
from fedtailor.methods.fedrep import FedRep
from fedtailor.optim import (
    MAY_MOVE,
    ClientContext,
    Optimiser,
    ParamGroups,
    batches_of_passes,
    train,
    with_gradient,
)
from fedtailor.params import Batch, Params, add_prefix
from fedtailor.task.task import Task
from tests.small import digits_backbone, last_round, same_bits

BATCH: Batch = {"pixel_values": torch.rand(6, 1, 8, 8), "labels": torch.arange(6)}


def run(task: Task, batches: list[Batch], optimiser: Optimiser, **options: Any) -> Params:
    context = ClientContext(random.key(0))
    return train(task, task.state, batches, context, optimiser, **options)[0]


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_parameters_that_may_not_move_keep_their_momentum(name: str) -> None:
    task = Task(digits_backbone())
    optimiser = Optimiser(name, lr=0.1, momentum=0.9, weight_decay=0.1)  # type: ignore[arg-type]
    allowed = torch.tensor([True] * 5 + [False] * 5)

    def loss(state: Params, batch: Batch, key: torch.Tensor) -> tuple[torch.Tensor, Params]:
        value, buffers = task.loss(state, batch, key)
        is_first = batch["labels"][0] == 0
        masks = {"head.bias": allowed & is_first, "conv.weight": torch.tensor(False)}
        return value, {**buffers, **add_prefix(masks, MAY_MOVE)}

    batches = [BATCH, {**BATCH, "labels": BATCH["labels"].flip(0)}]
    one, two = (run(task, batches[:steps], optimiser, loss=loss) for steps in (1, 2))
    assert one["conv.weight"].equal(task.state["conv.weight"])
    assert one["head.bias"][5:].equal(task.state["head.bias"][5:])
    assert not one["head.bias"][:5].eq(task.state["head.bias"][:5]).any()
    assert two["head.bias"].equal(one["head.bias"])  # momentum would have moved it
    assert not two["head.weight"].equal(one["head.weight"])  # not named: free


def test_parameters_have_rates_of_their_own_or_stay() -> None:
    task = Task(digits_backbone(dropout=0.0))
    rates = {"head.weight": 0.1, "head.bias": 0.3}
    one = run(task, [BATCH], Optimiser(lr=0.1))
    got = run(task, [BATCH], Optimiser(), lr=rates.get)
    torch.testing.assert_close(got["head.weight"], one["head.weight"])
    moved = one["head.bias"] - task.state["head.bias"]
    torch.testing.assert_close(got["head.bias"], task.state["head.bias"] + 3 * moved)
    for name in task.trained - rates.keys():
        assert got[name].equal(task.state[name])
    assert same_bits(run(task, [BATCH], Optimiser(), lr=lambda name: None), task.state)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(0, 3))
def test_groups_hold_small_parameters_in_one_vector(sizes: list[int], large: int) -> None:
    params = {f"small{n}": torch.randn(size, 2) for n, size in enumerate(sizes)}
    params |= {f"large{n}": torch.randn(256, 256) for n in range(large)}
    groups = ParamGroups(params)
    flat = groups.flatten(params)
    assert [len(group) for group in flat] == [256] * large + [2 * sum(sizes)]
    assert same_bits(groups.unflatten(flat), params)
    assert [rate.dim() for rate in groups.rates(lambda name: 0.1)] == [0] * (large + 1)


def test_a_rate_that_moves_within_a_training_has_its_mean_over_the_real_steps() -> None:
    task = Task(digits_backbone())

    def slope_of_one(state: Params, batch: Batch, key: torch.Tensor) -> tuple[torch.Tensor, Params]:
        return state["head.bias"].sum(), {}

    def moved(weights: list[float]) -> float:
        context = ClientContext(random.key(0), lr_scale=0.5, lr_slope=-0.8)
        batches = [{**BATCH, "weight": torch.full((6,), weight)} for weight in weights]
        state, _ = train(task, task.state, batches, context, Optimiser(lr=0.1), loss=slope_of_one)
        return float((task.state["head.bias"] - state["head.bias"]).mean())

    by_step = [0.05 * (1 - 0.8 * part) for part in (-0.375, -0.125, 0.125, 0.375)]
    assert moved([1, 1, 1, 1]) == pytest.approx(sum(by_step), rel=1e-4)
    assert moved([1, 1, 1, 1, 0]) == pytest.approx(0.2, rel=1e-4)
    half = [0.05 * (1 - 0.8 * part) for part in (-0.25, 0.25)]
    assert moved([1, 1]) == pytest.approx(sum(half), rel=1e-4)


def test_another_loss_is_minimised_instead() -> None:
    task = Task(digits_backbone())

    def size(state: Params, batch: Batch, key: torch.Tensor) -> tuple[torch.Tensor, Params]:
        return state["head.weight"].square().sum(), {}

    trained, loss = train(
        task, task.state, [BATCH], ClientContext(random.key(0)), Optimiser(lr=0.25), loss=size
    )
    torch.testing.assert_close(trained["head.weight"], 0.5 * task.state["head.weight"])
    torch.testing.assert_close(loss, task.state["head.weight"].square().sum())
    assert trained["conv.weight"].equal(task.state["conv.weight"])


def test_a_loss_may_bring_its_own_gradient() -> None:
    theta, g = {"x": torch.tensor([1.0, -2.0])}, {"x": torch.tensor([0.3, 1e6])}

    def loss(theta: Params) -> tuple[torch.Tensor, torch.Tensor]:
        value = with_gradient(theta["x"].square().sum(), theta, g)
        return value, value

    gradient, value = torch.func.grad(loss, has_aux=True)(theta)
    assert gradient["x"].equal(g["x"])
    assert value == 5.0


def test_padding_between_two_passes_shifts_no_dropout() -> None:
    task = Task(digits_backbone(dropout=0.5))
    real = {**BATCH, "weight": torch.ones(6)}
    padding = {name: torch.zeros_like(value) for name, value in real.items()}
    context, sgd = ClientContext(random.key(0)), Optimiser(lr=0.1)
    plain, loss = train(task, task.state, [real] * 2, context, sgd)
    padded, other = train(task, task.state, [real, padding] * 2, context, sgd)
    assert same_bits(plain, padded)
    assert loss.equal(other)


def counted(weights: list[float]) -> list[Batch]:
    return [
        {"labels": torch.tensor([n]), "weight": torch.tensor([w])} for n, w in enumerate(weights)
    ]


@pytest.mark.parametrize(
    ("passes", "expected"),
    [(1, [0, 1]), (2, [0, 1, 2, 3]), (3, [0, 1, 2, 3, 4, 5]), (4, [0, 1, 2, 3, 4, 5, 0, 1])],
)
def test_passes_use_a_round_s_batches_as_often_as_needed(passes: int, expected: list[int]) -> None:
    context = ClientContext(random.key(0), passes=3)  # of two batches each
    plain = [{"labels": torch.tensor([n])} for n in range(6)]
    taken = batches_of_passes(plain, context, passes)
    assert [int(batch["labels"]) for batch in taken] == expected
    padded = batches_of_passes(counted([1] * 6 + [0] * 3), context, passes)  # of 3 elsewhere
    real = [int(batch["labels"]) for batch in padded if batch["weight"].sum() > 0]
    assert real == expected


@pytest.mark.slow
@pytest.mark.parametrize("method", [FedRep(head_passes=4), Ditto(private_passes=2), FedALA()])
def test_passes_that_are_not_a_round_s_are_the_same_for_clients_together(method: Method) -> None:
    local = LocalConfig(batch_size=8, epochs=3)
    one, two = (
        last_round(method, local=local, engine=EngineConfig(executor=executor))[0].server
        for executor in ("sequential", "vectorised")
    )
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=1e-5, rtol=1e-4)
