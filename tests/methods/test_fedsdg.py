"""FedSDG by hand, equation by equation, in NumPy; then its degenerate cases and options."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

from fedtailor.engine.client import client_round
from fedtailor.errors import InputError
from fedtailor.method import Cohort
from fedtailor.methods.fedsdg import (
    FedSDG,
    GatedLoRALinear,
    alignment_weights,
    leave_one_out_weights,
)
from fedtailor.optim import ClientContext, Optimiser
from fedtailor.params import Params, stack
from fedtailor.random import key
from fedtailor.task.task import Task
from tests.golden import linear_backbone, logit_gradient

F64 = NDArray[np.float64]
RNG = np.random.default_rng(0)


def sigmoid(a: float) -> float:
    return float(1 / (1 + np.exp(-a)))


def test_equation_4_in_both_forms() -> None:
    x, a, rank, alpha = RNG.normal(size=(3, 5)), 0.7, 2, 6.0
    base = nn.Linear(5, 4)
    W0, b0 = base.weight.detach().double().numpy(), base.bias.detach().double().numpy()
    m, s = sigmoid(a), alpha / rank
    for form in ("branch", "factor"):
        layer = GatedLoRALinear(base, rank, alpha, form)  # type: ignore[arg-type]
        nn.init.normal_(layer.shared.B)
        assert layer.shared.A.shape == layer.private.A.shape == (rank, 5)
        assert layer.shared.B.shape == layer.private.B.shape == (4, rank)
        Ag, Bg, Ap, Bp = (
            p.detach().double().numpy()
            for p in (layer.shared.A, layer.shared.B, layer.private.A, layer.private.B)
        )
        if form == "branch":
            update = s * Bg @ Ag + m * s * Bp @ Ap
        else:
            update = s * (Bg + m * Bp) @ (Ag + m * Ap)
        got = layer(torch.tensor(x).float(), torch.tensor(a))
        np.testing.assert_allclose(got.detach().numpy(), x @ (W0 + update).T + b0, atol=1e-5)


def alignment(updates: F64, eps: float) -> F64:
    mean = updates.mean(0)
    alpha = np.array(
        [max(0, u @ mean / (np.linalg.norm(u) * np.linalg.norm(mean) + eps)) for u in updates]
    )
    return alpha / (alpha.sum() + eps)


@given(st.integers(1, 6), st.integers(1, 40), st.integers(0, 1000))
def test_equation_10(clients: int, size: int, seed: int) -> None:
    updates = np.random.default_rng(seed).normal(size=(clients, size))
    got = alignment_weights(torch.tensor(updates), eps=1e-8)
    np.testing.assert_allclose(got.numpy(), alignment(updates, 1e-8), atol=1e-9)


def test_leave_one_out_survives_an_update_that_is_far_larger() -> None:
    rng = np.random.default_rng(0)
    updates = rng.normal(size=(5, 50)).astype(np.float32)
    updates[2] *= 1e4
    u = updates.astype(np.float64)
    others = [np.delete(u, k, 0).mean(0) for k in range(5)]
    cosines = [
        a @ b / (np.linalg.norm(a) * np.linalg.norm(b)) for a, b in zip(u, others, strict=True)
    ]
    e = np.exp(cosines)
    got = leave_one_out_weights(torch.tensor(updates), 1.0)
    np.testing.assert_allclose(got, e / e.sum(), rtol=1e-6)


def test_a_zero_update_and_a_zero_mean_get_no_weight() -> None:
    one_zero = torch.tensor([[1.0, 2.0], [0.0, 0.0]])
    assert alignment_weights(one_zero).tolist() == pytest.approx([1.0, 0.0])
    opposite = torch.tensor([[1.0, 2.0], [-1.0, -2.0]])
    assert alignment_weights(opposite).tolist() == [0.0, 0.0]


def test_leave_one_out_compares_with_the_others_alone() -> None:
    updates, t = RNG.normal(size=(4, 9)), 0.3
    cosines = []
    for k, u in enumerate(updates):
        others = np.delete(updates, k, 0).mean(0)
        cosines.append(u @ others / (np.linalg.norm(u) * np.linalg.norm(others)))
    e = np.exp(np.array(cosines) / t)
    got = leave_one_out_weights(torch.tensor(updates), t)
    np.testing.assert_allclose(got.numpy(), e / e.sum(), atol=1e-6)
    assert leave_one_out_weights(torch.tensor(updates[:1]), t).tolist() == [1.0]
    with_zero = leave_one_out_weights(torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]), t)
    assert with_zero[2] == 0
    assert with_zero.sum() == pytest.approx(1.0)
    assert leave_one_out_weights(torch.zeros(2, 3), t).tolist() == [0.0, 0.0]


W0 = np.array([[0.5, -0.3, 0.2], [0.1, 0.4, -0.6]], dtype=np.float32)
X = [RNG.normal(size=(2, 3)), RNG.normal(size=(4, 3))]
Y = [np.array([0, 1]), np.array([1, 1, 0, 1])]


def numpy_step(
    state: dict[str, F64], x: F64, y: NDArray[np.int64], method: FedSDG
) -> dict[str, F64]:
    """Equations 5 to 8 with SGD and one joint clip, for logits y of one gated layer."""
    s, m = method.lora_alpha / method.rank, sigmoid(float(state["a"][0]))
    Ag, Bg, Ap, Bp = (state[n] for n in ("Ag", "Bg", "Ap", "Bp"))
    dz = logit_gradient(x @ (W0 + s * Bg @ Ag + m * s * Bp @ Ap).T, y)  # [n, classes]
    dW = dz.T @ x
    gradients = {
        "Ag": s * Bg.T @ dW,
        "Bg": s * dW @ Ag.T,
        "Ap": m * s * Bp.T @ dW + 2 * method.lambda2 * Ap,
        "Bp": m * s * dW @ Ap.T + 2 * method.lambda2 * Bp,
        "a": np.array([m * (1 - m) * ((s * dW * (Bp @ Ap)).sum() + method.lambda1)]),
    }
    norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
    assert method.optimiser.clip is not None
    factor = min(1.0, method.optimiser.clip / norm)
    rates = {"Ag": 0.3, "Bg": 0.3, "Ap": 0.2, "Bp": 0.2, "a": 0.7}
    return {n: state[n] - rates[n] * factor * gradients[n] for n in state}


NAMES = {
    "Ag": "linear.shared.A",
    "Bg": "linear.shared.B",
    "Ap": "linear.private.A",
    "Bp": "linear.private.B",
    "a": "gate_logits",
}


@pytest.mark.parametrize("clip", [0.05, 100.0])
def test_one_round_of_two_clients(clip: float) -> None:
    method = FedSDG(
        rank=1, lora_alpha=2.0, lambda1=0.05, lambda2=0.02,
        optimiser=Optimiser("sgd", lr=0.3, clip=clip), lr_private=0.2, lr_gate=0.7,
    )  # fmt: skip
    task = Task(linear_backbone(W0), method.adapt, seed=3)
    server = {n: v + 0.1 for n, v in method.init_server(task, 2, key(0)).items()}
    assert sorted(server) == ["linear.shared.A", "linear.shared.B"]
    uploads, deltas = [], []
    for k, (x, y) in enumerate(zip(X, Y, strict=True)):
        private = method.init_client(task, k, key(k))
        batch = {"x": torch.tensor(x).float(), "labels": torch.tensor(y)}
        start = {s: {**server, **private}[n].double().numpy() for s, n in NAMES.items()}
        expected = numpy_step(numpy_step(start, x, y, method), x, y, method)
        upload, kept, _ = client_round(
            method, task, server, private, [batch, batch], ClientContext(key(9))
        )
        for symbol in ("Ap", "Bp", "a"):
            np.testing.assert_allclose(kept[NAMES[symbol]], expected[symbol], atol=1e-5)
        delta = np.concatenate([(expected[n] - start[n]).ravel() for n in ("Ag", "Bg")])
        uploads.append(upload)
        deltas.append(delta)
    updates = np.stack(deltas)
    moved = alignment(updates, method.eps) @ updates  # (11)
    cohort = Cohort((0, 1), torch.tensor([2.0, 4.0], dtype=torch.float64), 1, key(0))
    new = method.aggregate(task, server, stack(uploads), cohort)
    got = torch.cat(
        [(new[n] - server[n]).flatten() for n in ("linear.shared.A", "linear.shared.B")]
    )
    np.testing.assert_allclose(got.numpy(), moved, atol=1e-5)


def test_private_b_at_zero_leaves_the_gate_to_the_penalty() -> None:
    batch = {"x": torch.tensor(X[0]).float(), "labels": torch.tensor(Y[0])}
    moved = {}
    for init in ("zero", "normal"):
        method = FedSDG(
            rank=1, lambda1=0.0, private_init=init,  # type: ignore[arg-type]
            optimiser=Optimiser("sgd", lr=0.1),
        )  # fmt: skip
        task = Task(linear_backbone(W0), method.adapt)
        state = {**method.init_server(task, 1, key(0)), **method.init_client(task, 1, key(1))}
        moved[init] = method.local(task, state, [batch], ClientContext(key(0)))[0][
            "gate_logits"
        ].item()
    assert moved["zero"] == 0.0
    assert moved["normal"] != 0.0


@pytest.mark.parametrize("gate", [0.0, 0.5, 1.0])
def test_a_fixed_gate_stays_and_the_branches_train_as_with_that_gate(gate: float) -> None:
    sgd = Optimiser("sgd", lr=0.1)
    fixed = FedSDG(rank=1, gate=gate, optimiser=sgd)
    task = Task(linear_backbone(W0), fixed.adapt)
    state = {**fixed.init_server(task, 1, key(0)), **fixed.init_client(task, 1, key(1))}
    batch = {"x": torch.tensor(X[0]).float(), "labels": torch.tensor(Y[0])}
    learned = FedSDG(rank=1, optimiser=sgd)
    trained, _ = fixed.local(task, state, [batch], ClientContext(key(0)))
    moving, _ = learned.local(task, state, [batch], ClientContext(key(0)))
    assert torch.sigmoid(trained["gate_logits"]).tolist() == [gate]
    for name in trained.keys() - {"gate_logits"}:  # in one step a gate's own move changes nothing
        torch.testing.assert_close(trained[name], moving[name])


def run_local(method: FedSDG, state: Params, task: Task) -> Params:
    batch = {"x": torch.tensor(X[1]).float(), "labels": torch.tensor(Y[1])}
    return method.local(task, state, [batch] * 3, ClientContext(key(0)))[0]


def test_closed_gates_and_uniform_weights_are_fedavg_lora() -> None:
    from fedtailor.methods.fedavg import FedAvg

    sgd = Optimiser("sgd", lr=0.3)
    ours = FedSDG(
        rank=1, lora_alpha=2.0, optimiser=sgd, lambda1=0, lambda2=0, aggregation="uniform"
    )
    theirs = FedAvg(trainable="lora", rank=1, lora_alpha=2.0, optimiser=sgd)
    task = Task(linear_backbone(W0), ours.adapt)
    lora = Task(linear_backbone(W0), theirs.adapt)
    server = ours.init_server(task, 2, key(0))
    closed = {**ours.init_client(task, 1, key(1)), "gate_logits": torch.tensor([-1e4])}
    mine = run_local(ours, {**server, **closed}, task)
    pairs = {"A": "linear.lora_A.default.weight", "B": "linear.lora_B.default.weight"}
    start = {name: server[f"linear.shared.{f}"] for f, name in pairs.items()}
    batch = {"x": torch.tensor(X[1]).float(), "labels": torch.tensor(Y[1])}
    assert lora.state.keys() == start.keys()
    state, _ = theirs.local(lora, start, [batch] * 3, ClientContext(key(0)))
    for factor, name in pairs.items():
        torch.testing.assert_close(mine[f"linear.shared.{factor}"], state[name])
    cohort = Cohort((0, 1), torch.tensor([5.0, 5.0], dtype=torch.float64), 1, key(0))
    uploads = stack([{"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}])
    zero = {"w": torch.tensor([0.0])}
    assert ours.aggregate(task, zero, uploads, cohort)["w"].item() == pytest.approx(2.0)
    assert theirs.aggregate(task, zero, uploads, cohort)["w"].item() == pytest.approx(2.0)


def test_every_aggregation_moves_by_its_weights() -> None:
    task = Task(linear_backbone(np.eye(2, dtype=np.float32)))
    uploads = stack([{"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([0.6, 0.8])}])
    server = {"w": torch.zeros(2)}
    cohort = Cohort((0, 1), torch.tensor([1.0, 3.0], dtype=torch.float64), 1, key(0))
    expected = {
        "uniform": [0.8, 0.4],
        "examples": [0.7, 0.6],
        "alignment": [0.8, 0.4],  # by symmetry
        "leave-one-out": [0.8, 0.4],
    }
    for aggregation, moved in expected.items():
        method = FedSDG(aggregation=aggregation)  # type: ignore[arg-type]
        assert method.aggregate(task, server, uploads, cohort)["w"].tolist() == pytest.approx(moved)


def test_what_is_private() -> None:
    task = Task(linear_backbone(np.eye(2, dtype=np.float32)))
    names = ["gate_logits", "x.private.A", "x.private.B", "x.shared.A", "x.shared.B", "head.weight"]
    assert [FedSDG().is_private(task, n) for n in names] == [True, True, True, False, False, False]
    assert FedSDG(private_head=True).is_private(task, "head.weight")
    for name in ("body.ssm.A", "a.b.AB", "head.x.B", "x.shared.C"):  # no factors of ours
        assert not FedSDG().is_private(task, name)
        assert FedSDG(private_head=True).is_private(task, name)


def test_a_private_head_of_a_model_without_one_is_refused() -> None:
    method = FedSDG(rank=1, private_head=True)
    task = Task(linear_backbone(W0), method.adapt)
    with pytest.raises(InputError, match=r"fedsdg\.private_head is true.*model\.head"):
        method.check(task, 2, 2, 1)
    FedSDG(rank=1).check(task, 2, 2, 1)


def test_exported_factors_act_as_the_layer_does() -> None:
    for form in ("branch", "factor"):
        method = FedSDG(rank=1, form=form)  # type: ignore[arg-type]
        task = Task(linear_backbone(W0), method.adapt)
        state = {n: torch.randn_like(v) for n, v in task.state.items()}
        A, B = method.lora(task, state)["linear"]
        x = torch.tensor(X[0]).float()
        merged = x @ (torch.tensor(W0) + B @ A).T
        torch.testing.assert_close(merged, task.logits(state, {"x": x}))


def test_the_global_model_has_no_private_part() -> None:
    method = FedSDG(rank=1)
    task = Task(linear_backbone(W0), method.adapt)
    server = {n: torch.randn_like(v) for n, v in method.init_server(task, 2, key(0)).items()}
    x = torch.tensor(X[0]).float()
    state = method.global_state(task, server)
    assert state is not None
    s = method.lora_alpha / method.rank
    W = torch.tensor(W0) + s * server["linear.shared.B"] @ server["linear.shared.A"]
    torch.testing.assert_close(task.logits(state, {"x": x}), x @ W.T)
