"""Of every method that chooses what it trains as FedAvg does: these fields do what they say."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from fedtailor.data.config import LocalConfig
from fedtailor.engine.config import CohortConfig, EvaluateConfig, Plan
from fedtailor.engine.prepare import memory_states
from fedtailor.engine.rounds import rounds
from fedtailor.method import Method
from fedtailor.methods import METHODS
from fedtailor.task.task import Task
from tests.small import digits_backbone, digits_federation

LITTLE = EvaluateConfig(clients=1, global_model=False)
SHARED = {"trainable", "layers", "rank", "lora_alpha"}
METHODS_OF_ANY_PART = [
    name
    for name, kind in METHODS.items()
    # pfedmoe's experts are copies, fedlora trains LoRA alone
    if {f.name for f in fields(kind)} >= SHARED and name not in ("pfedmoe", "fedlora")
]
A, B = "hidden.lora_A.default.weight", "hidden.lora_B.default.weight"
HIDDEN, HEAD = {"hidden.weight", "hidden.bias"}, {"head.weight", "head.bias"}


def made(name: str, **chosen: Any) -> tuple[Method, Task]:
    method = replace(METHODS[name](), **chosen)
    return method, Task(digits_backbone(), method.adapt)


@pytest.mark.parametrize("name", METHODS_OF_ANY_PART)
def test_what_is_trained_follows_trainable_and_layers(name: str) -> None:
    assert made(name)[1].trained > {"conv.weight"} | HIDDEN | HEAD
    assert made(name, layers=("hid*", "head"))[1].trained == HIDDEN | HEAD
    assert made(name, trainable="head")[1].trained == HEAD
    assert made(name, trainable="lora")[1].trained == {A, B} | HEAD


@pytest.mark.parametrize("name", METHODS_OF_ANY_PART)
def test_rank_and_alpha_are_loras_where_it_is_used_and_in_its_factors(name: str) -> None:
    batch = digits_federation().batch(digits_federation().rows(0, "test"))
    found, logits = [], []
    for alpha, added in ((6.0, 0.2), (12.0, 0.1)):  # the same product
        method, task = made(name, trainable="lora", rank=3, lora_alpha=alpha)
        assert len(task.state[A]) == 3
        state = {**task.state, B: task.state[B] + added}
        logits.append(task.logits(state, batch))
        assert not torch.allclose(logits[-1], task.logits(task.state, batch), atol=1e-3)
        found.append(method.lora(task, state))
    torch.testing.assert_close(*logits)
    if name != "fedem":  # a client uses several models, and exports none
        for factors in found:
            assert factors["hidden"][0].equal(task.state[A])
            torch.testing.assert_close(factors["hidden"][1], torch.full((16, 3), 0.4))


def personal_models() -> list[str]:
    """Methods whose clients keep a model as it is used, and that know its adapter."""
    method = {name: kind() for name, kind in METHODS.items()}
    return [
        name
        for name in METHODS_OF_ANY_PART
        if not method[name].finetune_passes and name not in ("fedbn", "fedem")
    ]


@pytest.mark.parametrize("name", personal_models())
def test_what_is_portable_is_what_predicts(name: str) -> None:
    """For a client that took part, and one that did not, if there is one."""
    method, task = made(name, trainable="lora")
    federation = digits_federation()
    store = memory_states(method, task, federation)
    plan = Plan(1, LocalConfig(batch_size=16), CohortConfig(size=2), evaluate=LITTLE)
    done = next(rounds(method, task, federation, plan, store=store))
    batch = federation.batch(federation.rows(0, "test"))
    plain = Task(digits_backbone())
    for client in (done.cohort.clients[0], *sorted({*range(5)} - {*done.cohort.clients})[:1]):
        state = {**method.send(task, done.server, client), **store.read(client)}
        portable = method.portable(task, state)
        ((path, (A, B)),) = portable.lora.items()
        assert path == "hidden"
        weight = plain.state["hidden.weight"] + B @ A
        used = {**plain.state, "hidden.weight": weight, **portable.tensors}
        logits = plain.logits(used, batch)
        torch.testing.assert_close(logits, method.predict(task, state, batch), atol=1e-5, rtol=1e-5)
