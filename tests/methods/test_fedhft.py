"""FedHFT by hand, equation by equation, in NumPy; then its degenerate cases, options and limits."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

from fedtailor import random
from fedtailor.engine.client import client_round
from fedtailor.engine.costs import wire_bytes
from fedtailor.errors import InputError
from fedtailor.method import Cohort, Server
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedhft import FedHFT, MixtureLoRALinear, row_importance, row_weights
from fedtailor.optim import ClientContext, Optimiser
from fedtailor.params import Batch, Params, stack
from fedtailor.random import key
from fedtailor.runs.experiment import parse
from fedtailor.task.backbone import Backbone
from fedtailor.task.task import Task
from tests.golden import linear_backbone, logit_gradient
from tests.lora import truncated

F64 = NDArray[np.float64]
RNG = np.random.default_rng(0)


def tensor(value: F64) -> torch.Tensor:
    return torch.tensor(value).float()


def random_product(d_out: int, R: int, d_in: int, seed: int = 0) -> tuple[F64, F64]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(d_out, R)), rng.normal(size=(R, d_in))


@given(st.integers(1, 7), st.integers(1, 4), st.integers(1, 9), st.integers(0, 99))
def test_equation_6_is_the_squared_norm_of_each_row(
    d_out: int, r: int, d_in: int, seed: int
) -> None:
    B, A = random_product(d_out, r, d_in, seed)
    expected = np.array([sum((B[i] @ A[:, j]) ** 2 for j in range(d_in)) for i in range(d_out)])
    got = row_importance(torch.tensor(B), torch.tensor(A))
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-9, atol=1e-12)


W0 = RNG.normal(size=(4, 5)).astype(np.float32)
X = [RNG.normal(size=(n, 5)) for n in (3, 5, 2)]
Y = [RNG.integers(0, 4, size=len(x)) for x in X]
N = torch.tensor([3.0, 5.0, 2.0], dtype=torch.float64)
P = np.array([[0.7, 0.3], [0.1, 0.9], [0.5, 0.5]])
SGD = Optimiser("sgd", lr=0.3)


def batch(k: int) -> Batch:
    return {"x": tensor(X[k]), "labels": torch.tensor(Y[k])}


def cohort(clients: tuple[int, ...] = (0, 1, 2), number: int = 1) -> Cohort:
    return Cohort(clients, N[list(clients)], number, key(7))


def server_of(method: FedHFT, task: Task) -> Server:
    """A server in mid-run: adapters and assignments that are not what they started from."""
    server = method.init_server(task, 3, key(0))
    for name in ("linear.A", "linear.B"):
        server[name] = random.normal(key(name), tuple(server[name].shape), 0.5)
    return {**server, "assignments": tensor(P)[:, : method.clusters]}


def run_client(method: FedHFT, task: Task, server: Server, k: int) -> Params:
    received, private = method.send(task, server, k), method.init_client(task, k, key(k))
    context = ClientContext(key("client", k))
    upload, kept, _ = client_round(method, task, received, private, [batch(k)] * 2, context)
    assert kept.keys() == private.keys()
    return method.unpack(task, method.pack(task, upload))


def numpy_client(W: F64, A: F64, k: int, s: float, rho: float) -> tuple[F64, NDArray[np.bool_]]:
    """Two steps of SGD on s B A from B = 0; the rows sent, and which they are (4, 6, 7)."""
    A, B = A.copy(), np.zeros((4, len(A)))
    for _ in range(2):
        dW = logit_gradient(X[k] @ (W + s * B @ A).T, Y[k]).T @ X[k]
        A, B = A - 0.3 * s * B.T @ dW, B - 0.3 * s * dW @ A.T
    product = s * B @ A
    kept = np.ones(4, dtype=bool)
    kept[np.argsort((product**2).sum(1), kind="stable")[: int(rho * 4)]] = False
    return product * kept[:, None], kept


@pytest.mark.parametrize("exact", [False, True])
def test_one_round_of_three_clients_and_two_clusters(exact: bool) -> None:
    method = FedHFT(
        clusters=2, rank=2, lora_alpha=6.0, mask_ratio=0.5, exact_svd=exact, optimiser=SGD
    )  # fmt: skip
    task = Task(linear_backbone(W0), method.adapt, seed=3)
    server = server_of(method, task)
    Ac, Bc = (server[f"linear.{f}"].double().numpy() for f in "AB")
    uploads, deltas, masks = [], [], []
    for k in range(3):
        received = W0 + sum(P[k, c] * Bc[c] @ Ac[c] for c in range(2))  # (4)
        logits = task.logits(method.send(task, server, k), batch(k))
        np.testing.assert_allclose(logits.numpy(), X[k] @ received.T, atol=1e-5)
        upload = run_client(method, task, server, k)
        start = random.normal(random.fold_in(server["start"], 0), (2, 5), 2**-0.5)
        delta, mask = numpy_client(received, start.double().numpy(), k, 3.0, 0.5)
        np.testing.assert_allclose(upload["linear.B"] @ upload["linear.A"], delta, atol=1e-5)
        assert upload["linear.kept"].tolist() == mask.tolist()
        uploads.append(upload)
        deltas.append(delta)
        masks.append(mask)
    new = method.aggregate(task, server, stack(uploads), cohort())
    for c in range(2):
        moved = np.zeros((4, 5))
        for i in range(4):
            w = [P[k, c] * float(N[k]) * masks[k][i] for k in range(3)]
            if sum(w) > 0:
                moved[i] = sum(w[k] * deltas[k][i] for k in range(3)) / sum(w)
        expected = truncated(Bc[c] @ Ac[c] + moved, 2)  # (8)
        got = new["linear.B"][c] @ new["linear.A"][c]
        np.testing.assert_allclose(got.numpy(), expected, atol=1e-5)
        weights = P[:, c] * N.numpy()
        shares = np.stack(masks).T @ weights / weights.sum()
        np.testing.assert_allclose(new["linear.sent"][c].numpy(), shares, atol=1e-6)
    assert new["assignments"].equal(server["assignments"])  # warm-up
    assert not new["start"].equal(server["start"])


def test_a_cohort_of_newcomers_joins_the_clusters_that_are_there() -> None:
    method = FedHFT(clusters=2, rank=2, mask_ratio=0.0, warmup_rounds=0)
    task = Task(linear_backbone(W0), method.adapt)
    server = server_of(method, task)
    members = torch.tensor([1, 0, 1, 0, 0, 1])
    server["assignments"] = torch.cat([torch.full((6, 2), 0.5), torch.tensor([[0.9, 0.1]])])
    noise = 0.05 * random.normal(key("noise"), (6, 4, 2))
    upload = {"linear.A": server["linear.A"][members], "linear.kept": torch.ones(6, 4).bool()}
    upload["linear.B"] = server["linear.B"][members] + noise
    weights = torch.ones(6, dtype=torch.float64)
    new = method.aggregate(task, server, upload, Cohort(tuple(range(6)), weights, 3, key(7)))
    assert new["assignments"][:6].argmax(1).equal(members)


def test_rows_are_weighed_by_assignment_examples_and_mask() -> None:
    w, kept = RNG.random(3), RNG.random((3, 4)) > 0.3
    kept[:, 2] = False
    total = torch.tensor(w @ kept)
    got = row_weights(torch.tensor(w), torch.tensor(kept), total)
    for i in range(4):
        expected = w * kept[:, i] / ((w * kept[:, i]).sum() or 1.0)
        np.testing.assert_allclose(got[:, i], expected)


def test_rows_and_clusters_that_nobody_sent_stay() -> None:
    method = FedHFT(clusters=2, rank=3, mask_ratio=0.0)
    task = Task(linear_backbone(W0[:3]), method.adapt)
    server = server_of(method, task)
    server["assignments"] = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.5, 0.5]])
    upload = {"linear.A": torch.rand(2, 3, 5), "linear.B": torch.rand(2, 3, 3)}
    kept = torch.tensor([[True, False, False], [True, True, False]])
    upload["linear.B"] = upload["linear.B"] * kept[..., None]
    new = method.aggregate(task, server, {**upload, "linear.kept": kept}, cohort((0, 1)))
    old_product, product = (s["linear.B"] @ s["linear.A"] for s in (server, new))
    deltas = upload["linear.B"] @ upload["linear.A"]
    torch.testing.assert_close(product[1], old_product[1])  # no weight in the second cluster
    torch.testing.assert_close(product[0, 2], old_product[0, 2])
    torch.testing.assert_close(product[0, 1], old_product[0, 1] + deltas[1, 1])
    both = (3 * deltas[0, 0] + 5 * deltas[1, 0]) / 8
    torch.testing.assert_close(product[0, 0], old_product[0, 0] + both)
    assert new["linear.sent"].tolist() == [[1.0, pytest.approx(5 / 8), 0.0], [0.0] * 3]


class Normed(nn.Module):
    """A projection to adapt, and a head with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 4)
        self.head = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.linear(x))


def with_head() -> Backbone:
    return Backbone(Normed(), blocks=(("linear",),), head=("head",))


def test_the_head_moves_in_each_cluster_by_its_own_weights() -> None:
    method = FedHFT(clusters=2, rank=2)
    task = Task(with_head(), method.adapt)
    assert task.trained == {
        "linear.A", "linear.B", "head.0.weight", "head.0.bias", "head.1.weight", "head.1.bias",
    }  # fmt: skip
    server = method.init_server(task, 3, key(0))
    server["assignments"] = tensor(P)
    name, var = "head.0.bias", "head.1.running_var"
    server[name] = torch.tensor([[1.0, 2.0, 3.0], [5.0, 6.0, 7.0]])
    received = [method.send(task, server, k) for k in range(3)]
    for k in range(3):
        np.testing.assert_allclose(received[k][name], P[k] @ server[name].numpy(), atol=1e-6)
    moves = RNG.normal(size=(3, 3))
    trained = [
        {**r, "linear.kept": torch.ones(4, dtype=torch.bool), "linear.A": torch.zeros(2, 5),
         "linear.B": torch.zeros(4, 2), name: r[name] + tensor(moves[k]), var: r[var] - 2}
        for k, r in enumerate(received)
    ]  # fmt: skip
    uploads = [method.upload(task, r, t) for r, t in zip(received, trained, strict=True)]
    new = method.aggregate(task, server, stack(uploads), cohort())
    for c in range(2):
        w = P[:, c] * N.numpy()
        expected = server[name][c].numpy() + w @ moves / w.sum()
        np.testing.assert_allclose(new[name][c].numpy(), expected, atol=1e-6)
    assert not new[var].any()  # 1 - 2 would be no variance
    assert new["head.0.weight"].equal(server["head.0.weight"])


def test_one_cluster_without_mask_at_full_rank_is_fedavg_on_products() -> None:
    method = FedHFT(clusters=1, rank=4, lora_alpha=8.0, mask_ratio=0.0, optimiser=SGD)
    task = Task(linear_backbone(W0), method.adapt)
    server = server_of(method, task)
    server["assignments"] = torch.ones(3, 1)
    lora = FedAvg(trainable="lora", rank=4, lora_alpha=8.0, optimiser=SGD)
    uploads, products = [], []
    old = (server["linear.B"] @ server["linear.A"])[0]
    start = random.normal(random.fold_in(server["start"], 0), (4, 5), 0.5)
    for k in range(3):
        merged = Task(linear_backbone(W0 + old.numpy()), lora.adapt)
        begin = {
            "linear.lora_A.default.weight": start,
            "linear.lora_B.default.weight": torch.zeros(4, 4),
        }
        assert begin.keys() == merged.state.keys()
        trained, _ = lora.local(merged, begin, [batch(k)] * 2, ClientContext(key("client", k)))
        A, B = lora.lora(merged, trained)["linear"]
        products.append(B @ A)
        uploads.append(run_client(method, task, server, k))
    new = method.aggregate(task, server, stack(uploads), cohort(number=99))
    mean = sum(share * product for share, product in zip(N / N.sum(), products, strict=True))
    torch.testing.assert_close((new["linear.B"] @ new["linear.A"])[0], (old + mean).float())


def test_each_client_has_its_own_rank_and_mask_and_sends_no_more() -> None:
    method = FedHFT(
        clusters=2, rank=(1, 4, 2), mask_ratio=(0.0, 0.25, 0.75),
        optimiser=Optimiser("adam", lr=0.1, weight_decay=0.1, clip=1.0),
    )  # fmt: skip
    task = Task(linear_backbone(W0), method.adapt)
    server = server_of(method, task)
    for k, (rank, rows) in enumerate([(1, 4), (4, 3), (2, 1)]):
        private = method.init_client(task, k + 3, key(0))  # client 3 is as client 0
        received = method.send(task, server, k)
        upload, _, _ = client_round(
            method, task, received, private, [batch(k)] * 2, ClientContext(key(k))
        )
        assert upload["linear.A"].shape == (4, 5)
        assert not upload["linear.A"][rank:].any()
        assert not upload["linear.B"][:, rank:].any()
        packed = method.pack(task, upload)
        assert {n: (v.shape, v.dtype) for n, v in packed.items()} == {
            "linear.A": ((rank, 5), torch.float32),
            "linear.B": ((rows, rank), torch.float32),
            "linear.kept": ((1,), torch.uint8),
        }
        assert wire_bytes(packed)["float32"] == 4 * rank * (5 + rows)
        assert f"{packed['linear.kept'].item():08b}"[4:].count("1") == rows
        again = method.unpack(task, packed)
        assert again.keys() == upload.keys()
        assert all(again[name].equal(upload[name]) for name in upload)
    assert not any(method.is_private(task, name) for name in upload)


def test_a_smaller_rank_moves_the_product_as_far_in_its_first_step() -> None:
    sizes = []
    for rank in (4, 32):
        method = FedHFT(clusters=1, rank=(rank, 64), mask_ratio=0.0, optimiser=SGD)
        task = Task(linear_backbone(np.zeros((64, 80), np.float32)), method.adapt)
        server = method.init_server(task, 2, key(1))
        state = {**method.send(task, server, 0), **method.init_client(task, 0, key(0))}
        examples = {"x": random.normal(key(2), (16, 80)), "labels": torch.arange(16)}
        trained, _ = method.local(task, state, [examples], ClientContext(key(0)))
        W = trained["linear.B"] @ trained["linear.A"]
        direction = (torch.eye(64)[:16] - 1 / 64).T @ examples["x"] / 16
        sizes.append(((W * direction).sum() / direction.square().sum()).item())
    assert sizes[0] == pytest.approx(sizes[1], rel=0.5)


def test_the_fresh_adapter_is_common_to_the_round_or_each_clients_own() -> None:
    starts: dict[str, list[torch.Tensor]] = {}
    for start in ("common", "own"):
        method = FedHFT(clusters=1, rank=(2, 3), start=start, optimiser=Optimiser("sgd", lr=1e-9))  # type: ignore[arg-type]
        task = Task(linear_backbone(W0), method.adapt)
        server = method.init_server(task, 3, key(0))
        other = {**server, "start": key(5)}
        starts[start] = [
            run_client(method, task, at, k)["linear.A"]
            for at, k in ((server, 0), (server, 1), (server, 2), (other, 0))
        ]
    first, second, third, next_round = starts["common"]
    torch.testing.assert_close(first[:2] * 2**0.5, second[:2] * 3**0.5)
    assert first.equal(third)
    assert not first.allclose(next_round)
    first, second, third, same = starts["own"]
    assert not first.allclose(third)
    assert first.equal(same)


def test_a_client_may_train_on_before_its_model_is_used() -> None:
    method = FedHFT(clusters=2, rank=2, finetune_passes=2, optimiser=SGD)
    assert (FedHFT().finetune_passes, method.finetune_passes) == (0, 2)
    task = Task(linear_backbone(W0), method.adapt)
    server = server_of(method, task)
    state = {**method.send(task, server, 0), **method.init_client(task, 0, key(0))}
    tuned = method.finetune(task, state, [batch(0)] * 2, ClientContext(key(0)))
    before, after = (task.loss(s, batch(0), key(0))[0].item() for s in (state, tuned))
    assert after < before
    A, B = method.lora(task, tuned)["linear"]
    assert (A.shape, B.shape) == ((6, 5), (4, 6))
    x = tensor(X[0])
    torch.testing.assert_close(x @ (torch.tensor(W0) + B @ A).T, task.logits(tuned, {"x": x}))


def test_exported_factors_and_the_global_model() -> None:
    method = FedHFT(clusters=2, rank=2)
    task = Task(linear_backbone(W0), method.adapt)
    server = server_of(method, task)
    state = method.global_state(task, server)
    assert state is not None
    products = server["linear.B"] @ server["linear.A"]
    mean = torch.tensor(P.mean(0)).float()
    W = torch.tensor(W0) + mean[0] * products[0] + mean[1] * products[1]
    x = tensor(X[0])
    torch.testing.assert_close(task.logits(state, {"x": x}), x @ W.T)
    A, B = method.lora(task, state)["linear"]
    assert (A.shape, B.shape) == ((4, 5), (4, 4))
    torch.testing.assert_close(torch.tensor(W0) + B @ A, W)


def test_what_figures_see() -> None:
    method = FedHFT(clusters=2, rank=2)
    task = Task(linear_backbone(W0), method.adapt)
    server = server_of(method, task)
    seen = method.server_diagnostics(task, server, [2, 0])
    assert seen.keys() == {"assignments", "sent.linear"}
    assert seen["assignments"].equal(server["assignments"][[2, 0]])
    assert seen["sent.linear"].equal(server["linear.sent"])


def test_the_layer_starts_as_its_base() -> None:
    base = nn.Linear(5, 4)
    layer = MixtureLoRALinear(base, rank=2, lora_alpha=4.0, clusters=3)
    x = torch.rand(2, 5)
    torch.testing.assert_close(layer(x), base(x))
    assert layer.A_mix.shape == (6, 5)
    assert layer.B_mix.shape == (4, 6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mask_ratio": 1.0}, r"methods\.fedhft\.mask_ratio = 1\.0: input should be less than 1"),
        ({"mask_ratio": -0.1}, "greater than or equal to 0"),
        ({"mask_ratio": [0.5, 1.5]}, r"mask_ratio = \[0\.5, 1\.5\]: input should be less than 1"),
        ({"mask_ratio": []}, r"mask_ratio = \[\]"),
        ({"rank": [8, 0]}, r"rank = \[8, 0\]: input should be greater than 0"),
        ({"rank": []}, r"rank = \[\]"),
        ({"clusters": 0}, "greater than 0"),
        ({"warmup_rounds": -1}, "greater than or equal to 0"),
        ({"components": 0}, "greater than 0"),
        ({"reg_covar": 0.0}, "greater than 0"),
        ({"finetune_passes": -1}, "greater than or equal to 0"),
        ({"start": "shared"}, "should be 'common' or 'own'"),
        ({"updates": "all"}, "should be 'total' or 'round'"),
    ],
)
def test_bad_values_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse({"methods": {"fedhft": fields}})


def test_one_value_or_several_can_be_given() -> None:
    parsed = parse({"methods": {"fedhft": {"rank": [4, 8], "mask_ratio": [0, 0.5, 0.9]}}})
    assert parsed.methods["fedhft"] == FedHFT(rank=(4, 8), mask_ratio=(0.0, 0.5, 0.9))


def test_a_rank_above_a_layers_size_is_refused_wherever_it_stands() -> None:
    with pytest.raises(InputError, match=r"rank 5 is larger than the layer linear \(4 x 5\)"):
        Task(linear_backbone(W0), FedHFT(rank=(2, 5, 1)).adapt)


def test_exact_svd_is_used_where_it_is_chosen() -> None:
    backbone = linear_backbone(RNG.normal(size=(40, 50)).astype(np.float32))
    got, best = {}, torch.zeros(())
    for exact in (False, True):
        method = FedHFT(clusters=1, rank=2, exact_svd=exact)
        task = Task(backbone, method.adapt)
        server = method.init_server(task, 20, key(0))
        A, B = random.normal(key("A"), (20, 2, 50)), random.normal(key("B"), (20, 40, 2))
        kept = torch.ones(20, 40, dtype=torch.bool)
        at = Cohort(tuple(range(20)), torch.ones(20, dtype=torch.float64), 1, key(1))
        uploads = {"linear.A": A, "linear.B": B, "linear.kept": kept}
        new = method.aggregate(task, server, uploads, at)
        got[exact] = (new["linear.B"] @ new["linear.A"])[0]
        best = tensor(truncated((B @ A).mean(0).double().numpy(), 2))
    torch.testing.assert_close(got[True], best, atol=1e-5, rtol=1e-4)
    assert (got[False] - best).norm() > 1e-4 * best.norm()
