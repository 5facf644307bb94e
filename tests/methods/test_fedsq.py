"""FedSQ by hand: one hidden layer, two clients, three steps each, in NumPy; then what it equals."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedtailor.data.config import LocalConfig
from fedtailor.engine.client import client_round
from fedtailor.engine.config import EngineConfig, Plan
from fedtailor.engine.results import Round
from fedtailor.engine.rounds import rounds
from fedtailor.errors import InputError
from fedtailor.method import Cohort, Method
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedsq import FedSQ
from fedtailor.models import from_module
from fedtailor.optim import ClientContext, Optimiser
from fedtailor.params import CACHED, Batch, Params, add_prefix, stack
from fedtailor.random import key
from fedtailor.runs.experiment import parse
from fedtailor.runs.run import run
from fedtailor.task.backbone import Backbone
from fedtailor.task.task import Task
from tests.golden import logit_gradient
from tests.small import digits_backbone, digits_federation
from tests.text import tiny_bert, topics_federation

F64 = NDArray[np.float64]
RNG = np.random.default_rng(0)
W1, W2 = RNG.normal(size=(5, 3)).astype(np.float32), RNG.normal(size=(2, 5)).astype(np.float32)
X = [3 * RNG.normal(size=(2, 3)), 3 * RNG.normal(size=(4, 3))]
Y = [np.array([0, 1]), np.array([1, 1, 0, 1])]


class Hidden(nn.Module):
    """Logits W2 phi(W1 x)."""

    def __init__(self, phi: nn.Module) -> None:
        super().__init__()
        self.first, self.phi = nn.Linear(3, 5, bias=False), phi
        self.head = nn.Linear(5, 2, bias=False)
        self.first.weight = nn.Parameter(torch.tensor(W1))
        self.head.weight = nn.Parameter(torch.tensor(W2))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.phi(self.first(x)))


def hidden(phi: nn.Module | None = None) -> Backbone:
    return Backbone(Hidden(phi or nn.ReLU()), head=("head",))


def gelu(z: F64) -> tuple[F64, F64]:
    """phi and phi'."""
    cdf = np.vectorize(lambda v: 0.5 * (1 + math.erf(v / 2**0.5)))(z)
    return z * cdf, cdf + z * np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)


def relu_gate(z: F64) -> tuple[F64, F64]:
    return (z > 0) * 1.0, 0 * z


def relu6_gate(z: F64) -> tuple[F64, F64]:
    return (z > 0) * (z < 6) * 1.0, (z >= 6) * 6.0


def leaky_gate(z: F64) -> tuple[F64, F64]:
    return np.where(z > 0, 1.0, 0.1), 0 * z


def gelu_gate(z: F64) -> tuple[F64, F64]:
    value, slope = gelu(z)
    return slope, value - slope * z


# the slope and offset that z_SK fixes, by activation and option
GATES: dict[str, tuple[nn.Module, dict[str, str], Callable[[F64], tuple[F64, F64]]]] = {
    "ReLU": (nn.ReLU(), {}, relu_gate),
    "ReLU6": (nn.ReLU6(), {}, relu6_gate),
    "leaky ReLU": (nn.LeakyReLU(0.1), {}, leaky_gate),
    "GELU": (nn.GELU(), {}, gelu_gate),
    "GELU, the paper's mask": (nn.GELU(), {"smooth": "mask"}, relu_gate),
}


def batch_of(x: F64, y: NDArray[np.int64]) -> Batch:
    return {"x": torch.tensor(x).float(), "labels": torch.tensor(y)}


@pytest.mark.parametrize("name", GATES)
def test_one_round_of_two_clients(name: str) -> None:
    phi, options, gate = GATES[name]
    eta, decay = 0.1, 0.02
    optimiser = Optimiser("sgd", lr=eta, weight_decay=decay)
    method = FedSQ(optimiser=optimiser, **options)  # type: ignore[arg-type]
    task = Task(hidden(phi), method.adapt)
    drawn = np.random.default_rng(1)
    w_QK = {"first.weight": W1 + drawn.normal(size=W1.shape), "head.weight": W2 * 0.5}  # not w_SK
    received = {n: torch.tensor(v).float() for n, v in w_QK.items()}
    expected, uploads = [np.zeros(W1.shape), np.zeros(W2.shape)], []
    for share, x, y in zip([0.25, 0.75], X, Y, strict=True):
        slope, offset = gate(x @ W1.T.astype(np.float64))
        a, b = w_QK["first.weight"], w_QK["head.weight"]
        for _ in range(3):
            h = slope * (x @ a.T) + offset
            dz = logit_gradient(h @ b.T, y)
            a, b = (
                a - eta * ((dz @ b * slope).T @ x + decay * a),
                b - eta * (dz.T @ h + decay * b),
            )
        expected = [e + share * w for e, w in zip(expected, (a, b), strict=True)]
        upload, kept, _ = client_round(
            method, task, received, {}, [batch_of(x, y)] * 3, ClientContext(key(0))
        )
        assert not kept
        uploads.append(upload)
    cohort = Cohort((0, 1), torch.tensor([1.0, 3.0], dtype=torch.float64), 1, key(0))
    got = method.aggregate(task, received, stack(uploads), cohort)
    np.testing.assert_allclose(got["first.weight"], expected[0], atol=1e-5)
    np.testing.assert_allclose(got["head.weight"], expected[1], atol=1e-5)
    slope, offset = gate(X[0] @ W1.T.astype(np.float64))  # the model in use is the gated one
    h = slope * (X[0] @ expected[0].T) + offset
    logits = method.predict(task, got, batch_of(X[0], Y[0]))
    np.testing.assert_allclose(logits, h @ expected[1].T, atol=1e-4)


def test_a_chain_of_modules_is_trained_as_the_same_modules_in_a_class_are() -> None:
    class Chained(nn.Module):
        def __init__(self, chain: nn.Sequential) -> None:
            super().__init__()
            self.chain = chain

        def forward(self, pixel_values: Tensor) -> Tensor:
            result: Tensor = self.chain(pixel_values)
            return result

    torch.manual_seed(0)
    chain = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 10))
    given = Backbone(chain, prepare=lambda batch: {"input": batch["pixel_values"]})
    trained = []
    for backbone in (given, Backbone(Chained(chain))):
        method = FedSQ(optimiser=Optimiser("sgd", lr=0.5))
        task = Task(backbone, method.adapt)
        state, loss = method.local(task, task.state, [digits_batch()] * 3, ClientContext(key(0)))
        assert loss < 3
        trained.append({name.removeprefix("chain."): value for name, value in state.items()})
    assert trained[0].keys() == trained[1].keys() >= {"1.weight", "3.bias"}
    assert all(trained[0][name].equal(trained[1][name]) for name in trained[0])


def digits_batch(count: int = 9) -> Batch:
    return digits_federation().dataset.batch(np.arange(count))


def text_batch() -> Batch:
    return topics_federation().dataset.batch(np.arange(5))


@pytest.mark.parametrize("on", ["digits", "text"])
@pytest.mark.parametrize("max_pool", ["own", "structural"])
def test_it_starts_as_the_pretrained_network(on: str, max_pool: str) -> None:
    backbone, batch = (
        (digits_backbone(), digits_batch()) if on == "digits" else (tiny_bert(), text_batch())
    )
    plain, method = Task(backbone), FedSQ(max_pool=max_pool)  # type: ignore[arg-type]
    task = Task(backbone, method.adapt)
    assert method.predict(task, task.state, batch).equal(plain.logits(plain.state, batch))
    agreement = method.client_diagnostics(task, task.state, batch)["agreement"]
    assert agreement.eq(1).all()
    assert len(agreement) == (2 if on == "digits" else 3)  # the pooler's tanh, too


def test_the_maxima_are_those_of_the_copy_that_is_chosen() -> None:
    drawn = torch.randn(6, 1, 3, 3, generator=torch.Generator().manual_seed(0))
    logits = {}
    for max_pool in ("own", "structural"):
        method = FedSQ(max_pool=max_pool)  # type: ignore[arg-type]
        task = Task(digits_backbone(), method.adapt)
        w_QK = {**task.state, "conv.weight": drawn}
        logits[max_pool] = method.predict(task, w_QK, digits_batch())
    assert not logits["own"].allclose(logits["structural"], atol=1e-3)


def test_the_first_step_is_fedavgs() -> None:
    sgd = Optimiser(lr=0.1)
    batch = digits_batch()
    backbone = dataclasses.replace(digits_backbone(0.0), batch_norm="frozen")
    states = []
    for method in (FedSQ(optimiser=sgd), FedAvg(optimiser=sgd)):
        task = Task(backbone, method.adapt)
        one, _ = method.local(task, task.state, [batch], ClientContext(key(0)))
        two, _ = method.local(task, one, [batch], ClientContext(key(1)))
        states.append((one, two))
    (ours, ours_next), (theirs, theirs_next) = states
    assert all(ours[n].equal(theirs[n]) for n in ours)
    assert not ours_next["conv.weight"].equal(theirs_next["conv.weight"])


def last_round(method: Method, on: str, engine: EngineConfig = EngineConfig()) -> Round:
    backbone = digits_backbone(0.0) if on == "digits" else tiny_bert()
    federation = digits_federation() if on == "digits" else topics_federation()
    task = Task(backbone, method.adapt)
    plan = Plan(rounds=2, local=LocalConfig(batch_size=8), engine=engine)
    *_, last = rounds(method, task, federation, plan)
    return last


@pytest.mark.parametrize(
    ("on", "head"),
    [("digits", "head"), pytest.param("text", "classifier", marks=pytest.mark.slow)],
)
def test_training_the_head_alone_is_fedavg(on: str, head: str) -> None:
    sgd = Optimiser(lr=0.1, weight_decay=1e-3)
    theirs = last_round(FedAvg(layers=(head,), optimiser=sgd), on, EngineConfig(cache_mb=0))
    ours = last_round(FedSQ(layers=(head,), cache="none", optimiser=sgd), on)
    assert sorted(ours.server) == [f"{head}.bias", f"{head}.weight"]
    assert all(ours.server[n].equal(theirs.server[n]) for n in ours.server)
    assert ours.losses == theirs.losses
    assert ours.evaluations == theirs.evaluations
    cached = last_round(FedSQ(layers=(head,), optimiser=sgd), on)  # features of other batches
    for n in theirs.server:
        torch.testing.assert_close(cached.server[n], theirs.server[n], atol=1e-6, rtol=1e-5)


def test_a_round_shows_how_far_the_patterns_have_moved() -> None:
    observed = last_round(FedSQ(optimiser=Optimiser(lr=0.3)), "digits").diagnostics
    agreement = observed["client/agreement"]
    assert agreement.shape == (5, 2)
    assert (agreement > 0.3).all()
    assert (agreement < 1).any()


CACHES = {"none": set(), "masks": {"gate0.0"}, "masks+features": {"gate0.0", "features"}}


@pytest.mark.slow
@pytest.mark.parametrize("cache", CACHES)
def test_caches_change_nothing_but_the_work(cache: str) -> None:
    layers, sgd = ("hidden", "head"), Optimiser(lr=0.1)
    method = FedSQ(layers=layers, optimiser=sgd, cache=cache)  # type: ignore[arg-type]
    task = Task(digits_backbone(0.0), method.adapt)
    assert method.precompute(task, digits_batch()).keys() == CACHES[cache]
    plain = last_round(method, "digits", EngineConfig(cache_mb=0)).server
    for executor in ("sequential", "vectorised"):
        ours = last_round(method, "digits", EngineConfig(executor, 2)).server  # type: ignore[arg-type]
        for name in plain:
            torch.testing.assert_close(ours[name], plain[name], atol=2e-6, rtol=1e-5)


def test_a_cached_batch_needs_no_structural_pass() -> None:
    method = FedSQ(layers=("hidden", "head"))
    task = Task(digits_backbone(0.0), method.adapt)
    batch = digits_batch()
    cached = {**batch, **add_prefix(method.precompute(task, batch), CACHED)}
    passes = 0

    def count(module: nn.Module, inputs: object) -> None:
        nonlocal passes
        passes += 1

    task.model.get_submodule("hidden").register_forward_pre_hook(count)
    method.predict(task, task.state, cached)
    assert passes == 1
    method.predict(task, task.state, batch)
    assert passes == 3


@pytest.mark.slow
def test_smooth_activations_have_features_alone_to_cache() -> None:
    method = FedSQ(layers=("*.layer.1", "bert.pooler", "classifier"))
    backbone = tiny_bert()
    for module in backbone.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    task = Task(backbone, method.adapt)
    batch = text_batch()
    kept = method.precompute(task, batch)
    assert kept.keys() == {"features"}
    moved = {n: v + 0.05 * torch.randn_like(v) for n, v in task.state.items()}
    with_cache = method.predict(task, moved, {**batch, **add_prefix(kept, CACHED)})
    torch.testing.assert_close(with_cache, method.predict(task, moved, batch))


def test_the_structural_copy_normalises_with_running_statistics() -> None:
    method = FedSQ()
    task = Task(digits_backbone(), method.adapt)
    assert task.buffers == {"norm.running_mean", "norm.running_var"}  # those of w_QK are averaged
    batch = digits_batch()
    alone = {n: v[:1] for n, v in batch.items()}
    one, many = method.precompute(task, alone), method.precompute(task, batch)
    assert all(one[name].equal(many[name][:1]) for name in one)

    def loss(w: Params, batch: Batch, k: Tensor) -> Tensor:
        return method.local(task, w, [batch], ClientContext(k))[1]

    cached = {**batch, **add_prefix(many, CACHED)}  # in training, too
    torch.testing.assert_close(loss(task.state, cached, key(3)), loss(task.state, batch, key(3)))


class Sine(nn.Module):
    """Takes pictures, and has an activation without pieces or tangent of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(64, 5), nn.Linear(5, 10)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.head(torch.sin(self.first(pixel_values.flatten(1))))


def test_an_activation_that_cannot_be_gated_is_refused_before_anything_is_written(
    tmp_path: Path,
) -> None:
    experiment = parse({"rounds": 1, "split": {"clients": 2}, "methods": {"fedsq": {}}})
    backbone, dataset = from_module(Sine()), digits_federation().dataset
    refusal = r"FedSQ can't gate 'sin' in Sine; activations it can gate: abs, .*relu"
    with pytest.raises(InputError, match=refusal):
        run(experiment, tmp_path / "run", data=dataset, backbone=backbone)
    assert not (tmp_path / "run").exists()
    method = FedSQ(layers=("head",))  # above it there is nothing to gate
    task = Task(backbone, method.adapt)
    method.check_batch(task, digits_batch())


def test_layers_that_are_none_are_refused() -> None:
    with pytest.raises(InputError, match=r"layers 'layer4' names no layer .*: first, head"):
        Task(hidden(), FedSQ(layers=("layer4",)).adapt)


@pytest.mark.parametrize(
    ("field", "allowed"),
    [
        ("smooth", "'first-order' or 'mask'"),
        ("max_pool", "'own' or 'structural'"),
        ("cache", "'masks+features', 'masks' or 'none'"),
    ],
)
def test_an_option_that_is_none_is_refused(field: str, allowed: str) -> None:
    with pytest.raises(
        InputError, match=re.escape(f"fedsq.{field} = 'x': input should be {allowed}")
    ):
        parse({"methods": {"fedsq": {field: "x"}}})
