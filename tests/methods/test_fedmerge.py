"""FedMerge by hand, equation by equation, in NumPy; then its degenerate cases and options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedtailor.data.config import LocalConfig
from fedtailor.engine.client import client_round
from fedtailor.engine.config import CohortConfig, EngineConfig, Plan
from fedtailor.engine.rounds import rounds
from fedtailor.errors import InputError
from fedtailor.method import Cohort, Method
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedmerge import FedMerge, merge, merge_backward
from fedtailor.optim import ClientContext, Optimiser
from fedtailor.params import Params, stack
from fedtailor.random import key
from fedtailor.task.task import Task
from tests.golden import linear_backbone, softmax, softmax_gradient
from tests.small import check_all, digits_backbone, digits_federation, last_round
from tests.text import tiny_bert

F64 = NDArray[np.float64]
NEW = replace(digits_backbone(), pretrained=False)
RNG = np.random.default_rng(0)


def cohort(clients: tuple[int, ...], num_examples: list[float]) -> Cohort:
    return Cohort(clients, torch.tensor(num_examples, dtype=torch.float64), 1, key(0))


def backward(
    Theta: F64, a: F64, Delta: F64, p: F64, head: NDArray[np.intp], normalise: bool
) -> tuple[F64, F64]:
    """Equations 8 and 9 with the softmax of appendix D, client by client and model by model."""
    w = softmax(a)
    (m, d), moved, g = a.shape, np.zeros_like(Theta), np.zeros_like(a)
    for j in range(d):
        for i in range(m):
            total = sum(p[k] * w[k, j] for k in range(m)) if normalise else 1.0
            moved[j] += p[i] * w[i, j] / total * Delta[i]
            theta_i = sum(w[i, k] * Theta[k] for k in range(d))
            g[i, j] = p[i] * w[i, j] * ((Theta[j] - theta_i)[head] @ Delta[i][head])
    return moved, g


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 30), st.integers(0, 999))
def test_equation_4(d: int, m: int, size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    Theta, w = rng.normal(size=(d, size)), softmax(rng.normal(size=(m, d)))
    expected = [sum(w[i, j] * Theta[j] for j in range(d)) for i in range(m)]
    got = merge(torch.tensor(Theta), torch.tensor(w))
    np.testing.assert_allclose(got, np.stack(expected), atol=1e-12)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(3, 30), st.booleans(), st.integers(0, 999))
def test_equations_8_and_9(d: int, m: int, size: int, normalise: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    Theta, Delta, a = (rng.normal(size=s) for s in ((d, size), (m, size), (m, d)))
    p = rng.dirichlet(np.ones(m))
    last = np.arange(size - 2, size)
    mask = torch.arange(size) >= size - 2
    heads: list[Any] = [slice(size - 2, None), torch.tensor(last), mask]
    arrays = [torch.tensor(x) for x in (Theta, a, Delta, p)]
    moved, g = backward(Theta, a, Delta, p, last, normalise)
    for head in heads:
        got = merge_backward(*arrays, head, normalise)
        np.testing.assert_allclose(got[0], moved, atol=1e-9)
        np.testing.assert_allclose(got[1], g, atol=1e-9)
    _, g = backward(Theta, a, Delta, p, np.arange(size), normalise)
    np.testing.assert_allclose(merge_backward(*arrays, None, normalise)[1], g, atol=1e-9)


def test_both_updates_descend_the_objective() -> None:
    """Equations 3, 5 and 6: with Delta = -grad, the updates are -dL/dTheta and -dL/da."""
    Theta = torch.tensor(RNG.normal(size=(3, 7)), requires_grad=True)
    a = torch.tensor(RNG.normal(size=(4, 3)), requires_grad=True)
    p = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    targets = torch.tensor(RNG.normal(size=(4, 7)))
    theta = torch.softmax(a, 1) @ Theta
    theta.retain_grad()
    losses = (theta - targets).pow(4).sum(1)
    (p * losses).sum().backward()  # type: ignore[no-untyped-call]
    assert theta.grad is not None
    assert Theta.grad is not None
    assert a.grad is not None
    moved, g = merge_backward(Theta.detach(), a.detach(), -theta.grad / p[:, None], p, None, False)
    torch.testing.assert_close(moved, -Theta.grad)
    torch.testing.assert_close(g, -a.grad)


def test_many_columns_are_merged_chunk_by_chunk() -> None:
    size = (1 << 19) + 5
    rng = np.random.default_rng(1)
    Theta, Delta = (rng.normal(size=(2, size)).astype(np.float32) for _ in range(2))
    w = softmax(rng.normal(size=(2, 2)))
    merged = merge(torch.tensor(Theta), torch.tensor(w))
    np.testing.assert_allclose(merged, w @ Theta, rtol=1e-6, atol=1e-5)
    arrays = Theta, np.log(w), Delta, np.array([0.4, 0.6])
    moved, _ = merge_backward(*(torch.tensor(x) for x in arrays))
    assert moved.dtype == torch.float32
    c = np.array([[0.4], [0.6]]) * w
    np.testing.assert_allclose(moved, (c / c.sum(0)).T @ Delta, rtol=1e-6, atol=1e-5)


def test_a_model_without_weight_stays() -> None:
    Theta, Delta = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.ones(1, 2)
    a = torch.tensor([[0.0, -torch.inf]])
    for normalise in (True, False):
        moved, g = merge_backward(Theta, a, Delta, torch.ones(1), None, normalise)
        assert moved.tolist() == [[1.0, 1.0], [0.0, 0.0]]
        assert g.tolist() == [[0.0, 0.0]]


W = [np.array([[0.5, -0.3, 0.2], [0.1, 0.4, -0.6]]), np.array([[-0.2, 0.1, 0.7], [0.9, 0.0, 0.3]])]
LOGITS = np.array([[0.3, -0.4], [5.0, 6.0], [-0.2, 0.8]])
X = {0: RNG.normal(size=(2, 3)), 2: RNG.normal(size=(4, 3))}
Y = {0: np.array([0, 1]), 2: np.array([1, 1, 0, 1])}


@pytest.mark.parametrize("normalise", [True, False])
def test_one_round_of_two_clients_of_three(normalise: bool) -> None:
    eta, lr_w = 0.3, 0.7
    method = FedMerge(models=2, lr_w=lr_w, normalise=normalise, optimiser=Optimiser("sgd", lr=eta))
    task = Task(linear_backbone(W[0].astype(np.float32)), method.adapt)
    server = {
        "bank.linear.weight": torch.tensor(np.stack(W)).float(),
        "logits": torch.tensor(LOGITS),
    }
    w, uploads, deltas = softmax(LOGITS), [], []
    for k in (0, 2):
        merged = w[k, 0] * W[0] + w[k, 1] * W[1]  # (4)
        theta = merged.copy()
        for _ in range(2):
            theta -= eta * softmax_gradient(theta, X[k], Y[k])  # (7)
        deltas.append((theta - merged).ravel())
        batch = {"x": torch.tensor(X[k]).float(), "labels": torch.tensor(Y[k])}
        received = method.send(task, server, k)
        np.testing.assert_allclose(received["linear.weight"], merged, atol=1e-6)
        upload, kept, _ = client_round(
            method, task, received, {}, [batch] * 2, ClientContext(key(9))
        )
        assert not kept
        uploads.append(upload)
    moved, g = backward(
        np.stack([v.ravel() for v in W]), LOGITS[[0, 2]], np.stack(deltas),
        np.array([1 / 3, 2 / 3]), np.arange(6), normalise,
    )  # fmt: skip
    new = method.aggregate(task, server, stack(uploads), cohort((0, 2), [2.0, 4.0]))
    got = (new["bank.linear.weight"] - server["bank.linear.weight"]).flatten(1)
    np.testing.assert_allclose(got, moved, atol=1e-6)  # (8, 10)
    np.testing.assert_allclose(new["logits"][[0, 2]], LOGITS[[0, 2]] + lr_w * g, atol=1e-6)  # (11)
    assert new["logits"][1].tolist() == LOGITS[1].tolist()  # not in the cohort
    assert server["logits"].tolist() == LOGITS.tolist()


def finish(
    method: Method, engine: EngineConfig = EngineConfig(), number: int = 3, dropout: float = 0.2
) -> Params:
    plan = Plan(number, LocalConfig(batch_size=8), CohortConfig(size=3), engine=engine)
    task = Task(digits_backbone(dropout), method.adapt)
    *_, last = rounds(method, task, digits_federation(), plan)
    return last.server


@pytest.mark.slow
@pytest.mark.parametrize("trainable", ["full", "head", "lora"])
@pytest.mark.parametrize("normalise", [True, False])
def test_one_model_is_fedavg(trainable: Any, normalise: bool) -> None:
    merged = finish(FedMerge(models=1, trainable=trainable, normalise=normalise))
    averaged = finish(FedAvg(trainable=trainable))
    assert merged.pop("logits").count_nonzero() == 0
    assert merged.keys() == {f"bank.{name}" for name in averaged}
    for name, value in averaged.items():
        torch.testing.assert_close(merged[f"bank.{name}"][0], value, rtol=2e-6, atol=2e-7)


@pytest.mark.slow
@pytest.mark.parametrize("trainable", ["head", "lora"])
def test_frozen_layers_are_worked_out_once_an_example(trainable: Any) -> None:
    method = FedMerge(models=2, trainable=trainable)
    task = Task(digits_backbone(dropout=0.0), method.adapt)  # with dropout nothing can be kept
    federation = digits_federation()
    batch = federation.dataset.batch(federation.rows(0, "train"))
    assert method.precompute(task, batch).keys() == {"features"}
    kept, anew = (finish(method, EngineConfig(cache_mb=size), dropout=0.0) for size in (100.0, 0.0))
    for name, value in kept.items():
        torch.testing.assert_close(value, anew[name], rtol=1e-5, atol=1e-6)


def start(method: FedMerge, task: Task, clients: int = 5, seed: int = 0) -> Params:
    return method.init_server(task, clients, key(seed))


def uploads_of(server: Params, clients: int, seed: int = 0) -> Params:
    drawn = torch.Generator().manual_seed(seed)
    return {
        name.removeprefix("bank."): torch.randn((clients, *value.shape[1:]), generator=drawn)
        for name, value in server.items()
        if name != "logits"
    }


def test_fixed_weights_stay_and_the_selected_models_alone_are_merged() -> None:
    method = FedMerge(models=4, weights="fixed", selected=2)
    task = Task(digits_backbone(), method.adapt)
    server = start(method, task, 40)
    w = method.server_diagnostics(task, server, range(40))["weights"]
    assert ((w == 0.5).sum(1) == 2).all()
    assert ((w == 0).sum(1) == 2).all()
    assert len({tuple(row.tolist()) for row in w}) == 6  # every pair is drawn by somebody
    assert not start(method, task, 40, seed=1)["logits"].equal(server["logits"])
    first, second = np.flatnonzero(w[7])
    bank = server["bank.head.weight"]
    sent = method.send(task, server, 7)["head.weight"]
    torch.testing.assert_close(sent, (bank[first] + bank[second]) / 2)
    uploads = uploads_of(server, 1)
    new = method.aggregate(task, server, uploads, cohort((7,), [3.0]))
    assert new["logits"].equal(server["logits"])
    for j in range(4):
        step = uploads["head.weight"][0] if w[7, j] else torch.zeros(10, 16)
        torch.testing.assert_close(new["bank.head.weight"][j] - bank[j], step, rtol=0, atol=1e-6)


def test_dynamic_weights_keep_to_the_selected_models() -> None:
    method = FedMerge(models=4, selected=2, lr_w=50.0)
    task = Task(digits_backbone(), method.adapt)
    server = start(method, task)
    before = method.server_diagnostics(task, server, range(5))["weights"]
    new = method.aggregate(task, server, uploads_of(server, 2), cohort((1, 3), [3.0, 1.0]))
    after = method.server_diagnostics(task, new, range(5))["weights"]
    assert ((before == 0) == (after == 0)).all()
    assert (after[[1, 3]] != before[[1, 3]]).any(dim=1).all()
    assert after[[0, 2, 4]].equal(before[[0, 2, 4]])


def test_rows_of_the_logits_update_have_norm_lr_w() -> None:
    plain, unit = (FedMerge(models=3, lr_w=0.2, normalise_rows=rows) for rows in (False, True))
    task = Task(digits_backbone(), plain.adapt)
    server = start(plain, task)
    uploads = uploads_of(server, 3)
    uploads["head.weight"][2], uploads["head.bias"][2] = 0, 0
    args = task, server, uploads, cohort((0, 1, 4), [5.0, 1.0, 2.0])
    moved = {m: m.aggregate(*args)["logits"][[0, 1, 4]] for m in (plain, unit)}
    norms = moved[unit].norm(dim=1)
    assert norms.tolist() == pytest.approx([0.2, 0.2, 0.0])
    cosines = torch.cosine_similarity(moved[plain], moved[unit])
    assert cosines.tolist() == pytest.approx([1.0, 1.0, 0.0])


@pytest.mark.parametrize("members", [2, 4])
def test_the_largest_step_of_a_round_is_the_same_for_any_cohort(members: int) -> None:
    plain, bounded = FedMerge(models=3, lr_w=0.2), FedMerge(models=3, largest_step=0.1)
    task = Task(digits_backbone(), plain.adapt)
    server = start(plain, task)
    who = cohort(tuple(range(members)), [5.0, 1.0, 2.0, 4.0][:members])
    args = task, server, uploads_of(server, members), who
    by_rate, step = (
        method.aggregate(*args)["logits"] - server["logits"] for method in (plain, bounded)
    )
    torch.testing.assert_close(step, 0.1 * by_rate / by_rate.abs().max())


def moves_logits(method: FedMerge, task: Task, name: str) -> bool:
    """Whether an update of this one tensor changes the logits."""
    server = start(method, task)
    uploads = {n: torch.zeros_like(v) for n, v in uploads_of(server, 1).items()}
    uploads[name] = uploads_of(server, 1)[name]
    new = method.aggregate(task, server, uploads, cohort((0,), [1.0]))
    return bool((new["logits"] != server["logits"]).any())


def test_the_inner_product_goes_over_the_head_or_over_all_parameters() -> None:
    for inner, expected in (("head", {"head.weight", "head.bias"}), ("all", None)):
        method = FedMerge(models=2, inner=inner)  # type: ignore[arg-type]
        task = Task(NEW, method.adapt)
        counted = {name for name in task.state if moves_logits(method, task, name)}
        # weights and biases of batch normalisation start equal in all models
        assert counted == (expected or task.trained - {"norm.weight", "norm.bias"})


def test_without_a_head_the_last_block_that_is_trained_counts() -> None:
    method = FedMerge(models=2, trainable="lora", rank=2, jitter=0.5)
    for backbone, wanted in (
        (replace(tiny_bert(), head=()), "encoder.layer.1."),
        (tiny_bert(), "classifier."),
        (linear_backbone(W[0].astype(np.float32)), "linear."),
    ):
        if len(backbone.blocks) == 1:
            method = replace(method, rank=1)
        task = Task(backbone, method.adapt)
        server = start(method, task)
        server = {n: torch.randn_like(v) for n, v in server.items()}
        for name in task.state:
            uploads = {n: torch.zeros_like(v) for n, v in uploads_of(server, 1).items()}
            uploads[name] = torch.ones_like(uploads[name])
            new = method.aggregate(task, server, uploads, cohort((0,), [1.0]))
            moved = bool((new["logits"] != server["logits"]).any())
            assert moved == (wanted in name), name


def test_models_start_apart_by_the_jitter() -> None:
    for jitter in (0.05, 0.4):
        method = FedMerge(models=3, jitter=jitter)
        task = Task(digits_backbone(), method.adapt)
        models = start(method, task)["bank.hidden.weight"]
        assert models[0].equal(task.state["hidden.weight"])
        gaps = (models[1:] - models[0]).square().mean((1, 2)).sqrt()
        relative = gaps / models[0].square().mean().sqrt()
        assert relative.tolist() == pytest.approx([jitter] * 2, rel=0.2)


def test_a_variance_never_falls_below_zero_and_a_mean_may() -> None:
    method = FedMerge(models=2)
    task = Task(digits_backbone(), method.adapt)
    server = start(method, task)
    uploads = {n: torch.zeros_like(v) for n, v in uploads_of(server, 1).items()}
    uploads["norm.running_var"] -= torch.linspace(0.5, 3, 6)
    uploads["norm.running_mean"] -= 1.0
    new = method.aggregate(task, server, uploads, cohort((0,), [1.0]))
    expected = (1 - torch.linspace(0.5, 3, 6)).clamp(min=0).expand(2, 6)
    torch.testing.assert_close(new["bank.norm.running_var"], expected)
    assert (new["bank.norm.running_mean"] == -1.0).all()


def test_clients_that_nobody_has_seen_use_the_mean() -> None:
    method = FedMerge(models=3, lr_w=50.0)
    server = finish(method)
    task = Task(digits_backbone(), method.adapt)
    absent = (server["logits"] == 0).all(dim=1)
    model = method.global_state(task, server)
    assert model is not None
    for name, value in model.items():
        torch.testing.assert_close(value, server[f"bank.{name}"].mean(0))
    new_client = {**server, "logits": torch.zeros(1, 3, dtype=torch.float64)}
    for name, value in method.send(task, new_client, 0).items():
        torch.testing.assert_close(value, model[name])
    assert not absent.all()


def test_the_weights_of_these_clients_are_observed() -> None:
    method = FedMerge(models=2)
    task = Task(digits_backbone(), method.adapt)
    server = {**start(method, task, 3), "logits": torch.tensor(LOGITS)}
    got = method.server_diagnostics(task, server, (2, 0))
    assert got.keys() == {"weights"}
    np.testing.assert_allclose(got["weights"], softmax(LOGITS)[[2, 0]], atol=1e-6)


def test_lr_w_and_local_rates_are_apart() -> None:
    one, three = (finish(FedMerge(models=2, lr_w=w), number=1)["logits"] for w in (1.0, 3.0))
    torch.testing.assert_close(three, 3 * one)
    assert one.count_nonzero() > 0


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (FedMerge(models=3, selected=4), "selected = 4; allowed: 1 to models = 3"),
        (FedMerge(trainable="lora", jitter=0), "jitter = 0 makes 10 equal copies"),
        (FedMerge(trainable="lora", jitter=0, selected=10), "jitter = 0 makes 10 equal copies"),
    ],
)
def test_bad_fields_are_refused(method: FedMerge, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_all(method, Task(digits_backbone(), method.adapt), 5, 5, 3)


@pytest.mark.parametrize(
    "method",
    [
        FedMerge(),
        FedMerge(trainable="lora", jitter=0, models=1),
        FedMerge(trainable="lora", jitter=0, weights="fixed", selected=2),
        FedMerge(models=3, selected=3),
    ],
)
def test_good_fields_are_not(method: FedMerge) -> None:
    check_all(method, Task(digits_backbone(), method.adapt), 5, 5, 3)
    new = replace(method, trainable="full", jitter=0)  # models drawn anew need no noise
    check_all(new, Task(NEW, new.adapt), 5, 5, 3)


@dataclass(frozen=True)
class PrivateHead(FedMerge):
    """Each client keeps a head of its own; the models have all but that."""

    def is_private(self, task: Task, name: str) -> bool:
        return task.in_head(name)


def test_a_subclass_may_keep_tensors_private() -> None:
    last, store = last_round(PrivateHead(models=2), sizes=(9, 5))
    assert not any("head" in name for name in last.server)
    heads = [store.read(client)["head.weight"] for client in (0, 1)]
    assert not heads[0].equal(heads[1])
