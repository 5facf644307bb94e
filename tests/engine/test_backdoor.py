"""A backdoor's trigger in pictures and texts, and how often it works on honest clients."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedtailor as ft
from fedtailor.data.federation import Federation
from fedtailor.data.partition import partition
from fedtailor.data.table import Dataset, Tokens
from fedtailor.engine.backdoor import Trigger
from fedtailor.engine.config import EngineConfig, EvaluateConfig, Plan
from fedtailor.engine.results import Round
from fedtailor.engine.rounds import rounds
from fedtailor.method import Method
from fedtailor.optim import Optimiser
from fedtailor.task.backbone import Backbone
from fedtailor.task.task import Task
from fedtailor.uploads.attacks import AttackConfig
from tests.small import digits, same_bits

ATTACK = AttackConfig("backdoor", clients=(1,), target=3)
PLAN = Plan(10, ft.LocalConfig(batch_size=20), evaluate=EvaluateConfig(every=10), attack=ATTACK)
SGD = Optimiser("sgd", lr=0.3)


class Net(nn.Module):
    """The digits' pixels, a hidden layer, ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.head(torch.relu(self.hidden(pixel_values.flatten(1))))  # type: ignore[no-any-return]


def task(method: Method) -> Task:
    torch.manual_seed(0)
    return Task(Backbone(Net(), blocks=(("hidden",),), head=("head",), name="net"), method.adapt)


@cache
def federation() -> Federation:
    dataset = digits()
    return Federation(dataset, partition(dataset, ft.SplitConfig(5, "dirichlet", alpha=10.0), 0), 0)


def last_round(method: Method, plan: Plan = PLAN, **attack: Any) -> Round:
    plan = replace(plan, attack=replace(ATTACK, **attack))
    *_, last = rounds(method, task(method), federation(), plan)
    return last


def means(done: Round, model: str) -> tuple[float, float]:
    """Accuracy and the attack's success, over honest clients."""
    (test,) = [one for one in done.evaluations if (one.model, one.split) == (model, "test")]
    assert test.clients == (0, 2, 3, 4)
    success = [value for value in test.metrics["attack_success"] if value is not None]
    return float(np.mean([a for a in test.accuracy if a is not None])), float(np.mean(success))


@pytest.mark.slow
def test_a_backdoor_works_on_honest_clients_and_costs_them_no_accuracy() -> None:
    method = ft.FedAvg(optimiser=SGD)
    accuracy, low = means(last_round(method, first_round=1000), "global")
    assert low < 0.1
    weak = means(last_round(method), "global")
    boosted = means(last_round(method, strength=3.0), "global")
    assert weak[0] > accuracy - 0.05
    assert boosted[0] > accuracy - 0.1
    assert boosted[1] > max(0.8, weak[1])


@pytest.mark.slow
def test_personal_models_are_measured_and_processes_change_nothing() -> None:
    plan, method = replace(PLAN, rounds=2), ft.FedPer(optimiser=SGD)
    one = last_round(method, plan)
    engine = EngineConfig(executor="processes", processes=2, device="cpu")
    two = last_round(method, replace(plan, engine=engine))
    assert same_bits(one.server, two.server)
    assert means(one, "personal") == means(two, "personal")


@pytest.mark.slow
def test_what_is_computed_once_for_each_example_is_computed_anew() -> None:
    """With frozen layers below, the trigger is in what they give."""
    method, plan = ft.FedAvg(trainable="head", optimiser=SGD), replace(PLAN, rounds=1)
    cached = last_round(method, plan)
    plain = last_round(method, replace(plan, engine=EngineConfig(cache_mb=0.0)))
    for name, value in plain.server.items():
        torch.testing.assert_close(cached.server[name], value)
    assert means(cached, "global") == pytest.approx(means(plain, "global"))


def test_the_second_token_of_a_text_becomes_a_rare_one() -> None:
    tokens = Tokens(np.array([5, 6, 7, 8, 99, 4]), np.array([0, 3, 5, 6]))
    data = Dataset(tokens, 3, "classification", labels=np.array([0, 1, 1]), classes=("a", "b"))
    trigger = Trigger.of(tokens.values, 1)
    marked = trigger.stamped(data.batch(np.array([0, 1, 2])), 1)
    assert marked["input_ids"].tolist() == [[5, 99, 7], [8, 99, 0], [4, 0, 0]]
    assert marked["labels"].tolist() == [1, 1, 1]
    assert trigger.stamped(data.batch(np.array([0])), 0)["input_ids"].tolist() == [[5, 6, 7]]
