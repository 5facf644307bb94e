"""pFedMoE by hand: two linear experts, one head and a gate, differentiated in NumPy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedtailor.errors import InputError
from fedtailor.methods.pfedmoe import PFedMoE
from fedtailor.optim import ClientContext, Optimiser
from fedtailor.params import Params
from fedtailor.random import key
from fedtailor.task.backbone import Backbone
from fedtailor.task.task import Task
from tests import kinds
from tests.golden import X, Y, batch_of, logit_gradient, one_round, softmax
from tests.small import digits_backbone, digits_federation, last_round
from tests.text import tiny_bert, topics_federation

F64 = NDArray[np.float64]
RNG = np.random.default_rng(0)


class Two(nn.Module):
    """A linear body (2 to 3) and a linear head (3 to 2), without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 3, bias=False)
        self.head = nn.Linear(3, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def backbone() -> Backbone:
    return Backbone(Two(), blocks=(("body",),), head=("head",), name="two")


SHAPES = {
    "own.body.weight": (3, 2), "own.head.weight": (2, 3), "shared.body.weight": (3, 2),
    "gate.0.weight": (4, 2), "gate.0.bias": (4,), "gate.2.weight": (2, 4), "gate.2.bias": (2,),
}  # fmt: skip


def start(**fields: Any) -> tuple[PFedMoE, Task, dict[str, F64], list[dict[str, F64]]]:
    method = PFedMoE(hidden=4, **fields)
    task = Task(backbone(), method.adapt)
    assert {name: tuple(value.shape) for name, value in task.state.items()} == SHAPES
    drawn = [{name: RNG.normal(size=shape) for name, shape in SHAPES.items()} for client in (0, 1)]
    shared = {"shared.body.weight": drawn[0]["shared.body.weight"]}
    private = [{n: v for n, v in one.items() if n not in shared} for one in drawn]
    return method, task, shared, private


def tensors(state: dict[str, F64]) -> Params:
    return {name: torch.tensor(value).float() for name, value in state.items()}


def forward(w: dict[str, F64], x: F64) -> tuple[F64, ...]:
    hidden = np.maximum(x @ w["gate.0.weight"].T + w["gate.0.bias"], 0)
    a = softmax(hidden @ w["gate.2.weight"].T + w["gate.2.bias"])  # (a_G, a_F)
    G, F = x @ w["shared.body.weight"].T, x @ w["own.body.weight"].T
    R = a[:, :1] * G + a[:, 1:] * F
    return hidden, a, G, F, R, R @ w["own.head.weight"].T


def gradients(w: dict[str, F64], x: F64, y: NDArray[np.int64]) -> dict[str, F64]:
    hidden, a, G, F, R, z = forward(w, x)
    dz = logit_gradient(z, y)
    dR = dz @ w["own.head.weight"]
    da = np.stack([(dR * G).sum(1), (dR * F).sum(1)], axis=1)
    dg = a * (da - (a * da).sum(1, keepdims=True))
    dhidden = (dg @ w["gate.2.weight"]) * (hidden > 0)
    return {
        "own.head.weight": dz.T @ R,
        "shared.body.weight": (a[:, :1] * dR).T @ x,
        "own.body.weight": (a[:, 1:] * dR).T @ x,
        "gate.2.weight": dg.T @ hidden,
        "gate.2.bias": dg.sum(0),
        "gate.0.weight": dhidden.T @ x,
        "gate.0.bias": dhidden.sum(0),
    }


@pytest.mark.parametrize("lr_gate", [None, 0.3])
def test_one_round_trains_all_three_and_averages_the_shared_expert(lr_gate: float | None) -> None:
    eta = 0.1
    method, task, shared, private = start(lr_gate=lr_gate, optimiser=Optimiser("sgd", lr=eta))
    new, kept = one_round(method, task, tensors(shared), [tensors(own) for own in private])
    expected = np.zeros((3, 2))
    for client, share in enumerate([0.25, 0.75]):
        w = {**shared, **private[client]}
        for _ in range(3):
            g = gradients(w, X[client], Y[client])
            rate = {n: (lr_gate or eta) if n.startswith("gate.") else eta for n in w}
            w = {name: value - rate[name] * g[name] for name, value in w.items()}
        expected += share * w.pop("shared.body.weight")
        assert kept[client].keys() == w.keys()
        for name, value in w.items():
            np.testing.assert_allclose(kept[client][name], value, atol=1e-5, err_msg=name)
    assert new.keys() == shared.keys()
    np.testing.assert_allclose(new["shared.body.weight"], expected, atol=1e-5)


def test_the_prediction_is_that_of_the_mixed_features() -> None:
    method, task, shared, private = start()
    state = tensors({**shared, **private[1]})
    *_, z = forward({**shared, **private[1]}, X[1])
    np.testing.assert_allclose(method.predict(task, state, batch_of(1)), z, atol=1e-5)
    a = forward({**shared, **private[1]}, X[1])[1]
    observed = method.client_diagnostics(task, state, batch_of(1))["shared"]
    np.testing.assert_allclose(observed, a[:, 0].mean(), atol=1e-6)


def test_with_all_weight_on_one_expert_its_model_predicts() -> None:
    method = PFedMoE()
    task = Task(digits_backbone(), method.adapt)
    plain = Task(digits_backbone())
    noise = {n: torch.randn_like(v) for n, v in task.state.items() if "running" not in n}
    state = {**task.state, **noise}
    federation = digits_federation()
    batch = federation.dataset.batch(federation.rows(0, "train"))
    own = {name.removeprefix("own."): v for name, v in state.items() if name.startswith("own.")}
    shared = {**own, **{n[7:]: v for n, v in state.items() if n.startswith("shared.")}}
    assert own.keys() == plain.state.keys()
    for at, expected in ((0, shared), (1, own)):
        bias = torch.full((2,), -1e9).scatter(0, torch.tensor([at]), 1e9)
        sure = {**state, "gate.2.bias": bias}
        torch.testing.assert_close(method.predict(task, sure, batch), plain.logits(expected, batch))


def test_only_the_shared_expert_travels_and_running_statistics_are_apart() -> None:
    last, store = last_round(PFedMoE(), (9, 3), rounds=1)
    task = Task(digits_backbone(), PFedMoE().adapt)
    assert last.server.keys() == {
        f"shared.{name}" for name in Task(digits_backbone()).state if "head" not in name
    }
    kept = store.read(0)
    assert kept.keys() == task.state.keys() - last.server.keys()
    for name in ("norm.running_mean", "hidden.weight"):
        assert not kept[f"own.{name}"].equal(task.state[f"own.{name}"])
        assert not last.server[f"shared.{name}"].equal(task.state[f"shared.{name}"])
        assert not kept[f"own.{name}"].equal(last.server[f"shared.{name}"])


def test_with_lora_both_experts_stand_on_one_frozen_model() -> None:
    method = PFedMoE(trainable="lora", rank=2)
    task = Task(digits_backbone(), method.adapt)
    factors = {"hidden.lora_A.default.weight", "hidden.lora_B.default.weight"}
    shared = {name for name in task.state if not method.is_private(task, name)}
    assert shared == {f"shared.{name}" for name in factors}
    model: Any = task.model
    assert model.own.conv.weight is model.shared.conv.weight
    assert model.own.hidden.lora_A is not model.shared.hidden.lora_A
    drawn = [
        method.init_client(task, k, key(k))["own.hidden.lora_A.default.weight"] for k in (0, 1)
    ]
    assert not drawn[0].equal(drawn[1])
    assert not drawn[0].equal(task.state["shared.hidden.lora_A.default.weight"])
    assert drawn[0].std().item() == pytest.approx(2**-0.5, rel=0.3)
    for scaling in (8.0, 1.5):
        adapted: Any = Task(digits_backbone(), replace(method, lora_alpha=2 * scaling).adapt).model
        layers = (adapted.own.hidden, adapted.shared.hidden)
        assert [layer.scaling for layer in layers] == [scaling] * 2


@pytest.mark.parametrize("on", ["digits", "text"])
def test_the_gate_reads_pictures_and_texts_without_their_padding(on: str) -> None:
    federation = digits_federation() if on == "digits" else topics_federation()
    method = PFedMoE(pool=3, hidden=5)
    task = Task(digits_backbone() if on == "digits" else tiny_bert(), method.adapt)
    assert task.state["gate.0.weight"].shape == (5, 9 if on == "digits" else 32)
    rows = federation.rows(0, "train")[:3]
    several = method.predict(task, task.state, federation.dataset.batch(rows))
    one = method.predict(task, task.state, federation.dataset.batch(rows[:1]))
    torch.testing.assert_close(several[:1], one, atol=1e-5, rtol=0)
    heavy = {n: v * (100 if n == "gate.2.weight" else 1) for n, v in task.state.items()}
    heavy = {n: torch.randn_like(v) if n.startswith("shared.") and v.dim() > 1 else v
             for n, v in heavy.items()}  # fmt: skip
    moved = {**heavy, "gate.0.weight": -heavy["gate.0.weight"]}
    batch = federation.dataset.batch(rows)
    assert not method.predict(task, heavy, batch).allclose(method.predict(task, moved, batch))


def test_layers_chooses_what_the_experts_train() -> None:
    method = PFedMoE(layers=("h*",))
    task = Task(digits_backbone(), method.adapt)
    names = {name for name in task.trained if not name.startswith("gate.")}
    assert names == {
        *(f"own.{part}.{kind}" for part in ("hidden", "head") for kind in ("weight", "bias")),
        "shared.hidden.weight", "shared.hidden.bias",
    }  # fmt: skip
    federation = digits_federation()
    batch = federation.dataset.batch(federation.rows(0, "train")[:4])
    trained, _ = method.local(task, task.state, [batch], ClientContext(key(0)))
    assert all(not trained[name].equal(task.state[name]) for name in names)


@pytest.mark.parametrize("trainable", ["full", "lora"])
def test_a_language_models_gate_sees_no_token_to_come(trainable: Any) -> None:
    method = PFedMoE(hidden=5, trainable=trainable, rank=2)
    task = Task(kinds.backbone("causal-lm"), method.adapt)
    state = {name: value + 0.5 * torch.randn_like(value) for name, value in task.state.items()}
    assert any(not method.is_private(task, name) for name in state)
    ids = torch.randint(6, 14, (2, 7))
    batch = {"input_ids": ids, "attention_mask": torch.ones(2, 7)}
    logits, later = method.predict(task, state, batch), ids.clone()
    later[:, 4:] = (later[:, 4:] - 5) % 8 + 6
    changed = method.predict(task, state, {**batch, "input_ids": later})
    torch.testing.assert_close(logits[:, :4], changed[:, :4])
    assert not logits[:, 4:].allclose(changed[:, 4:])

    padded = {n: torch.cat([v, torch.zeros_like(v)], 1) for n, v in batch.items()}
    weights = [method.client_diagnostics(task, state, one)["shared"] for one in (batch, padded)]
    torch.testing.assert_close(weights[0], weights[1])

    own = {name: v for name, v in state.items() if name.startswith("own.")}
    shared = {f"own.{n[7:]}": v for n, v in state.items() if n.startswith("shared.")}
    experts = [task.logits({**own, **tensors}, batch) for tensors in (shared, {})]
    embedding: Tensor = kinds.backbone("causal-lm").model.get_input_embeddings().weight  # type: ignore[operator,union-attr]
    for last in range(7):  # the gate by hand: the mean of the embeddings so far
        x = embedding[ids[:, : last + 1]].mean(1)
        hidden = torch.relu(x @ state["gate.0.weight"].T + state["gate.0.bias"])
        a = torch.softmax(hidden @ state["gate.2.weight"].T + state["gate.2.bias"], 1)
        expected = a[:, :1] * experts[0][:, last] + a[:, 1:] * experts[1][:, last]
        torch.testing.assert_close(logits[:, last], expected)


@pytest.mark.parametrize("kind", ["classification", "causal-lm"])
def test_a_gate_reads_embeddings_in_bf16(kind: str) -> None:
    method = PFedMoE(hidden=5, trainable="lora", rank=2)
    whole, half = kinds.backbone(kind), kinds.backbone(kind)
    half.model.to(torch.bfloat16)
    batch = {"input_ids": torch.randint(6, 14, (2, 7)), "attention_mask": torch.ones(2, 7)}
    tasks = [Task(one, method.adapt) for one in (whole, half)]
    ours, theirs = (method.predict(task, tasks[0].state, batch) for task in tasks)
    torch.testing.assert_close(ours, theirs, atol=0.05, rtol=0.05)


def test_what_cannot_be_shared_is_refused() -> None:
    whole = digits_backbone()
    with pytest.raises(InputError, match="no recognised task head, which pfedmoe's experts share"):
        Task(replace(whole, head=()), PFedMoE().adapt)
    with pytest.raises(InputError, match=r"can't tell what .* reads"):
        Task(Backbone(nn.ReLU(), head=("x",)), PFedMoE().adapt)
    method = PFedMoE(layers=("head",))
    task = Task(whole, method.adapt)
    with pytest.raises(InputError, match=r"layers = \['head'\] trains nothing else; allowed"):
        method.check(task, 5, 5, 3)
    PFedMoE().check(Task(whole, PFedMoE().adapt), 5, 5, 3)
