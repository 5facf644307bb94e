"""pFedGate by hand, equation by equation, in NumPy; its degenerate case, options and errors."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from fedtailor.data.config import LocalConfig
from fedtailor.engine.checks import check
from fedtailor.engine.client import client_round
from fedtailor.engine.config import Plan
from fedtailor.errors import InputError
from fedtailor.layers.block_sparse.forward import adapted, select
from fedtailor.layers.gating import GatingLayer, gated_blocks
from fedtailor.method import Cohort
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.pfedgate import PFedGate
from fedtailor.optim import ClientContext, Optimiser
from fedtailor.params import Batch, stack
from fedtailor.random import key
from fedtailor.runs.experiment import parse
from fedtailor.task.backbone import Backbone
from fedtailor.task.task import Task
from tests.golden import linear_backbone, logit_gradient
from tests.pfedgate import pictures, set_gates, start
from tests.small import check_all, digits_backbone, digits_federation

F64 = NDArray[np.float64]
RNG = np.random.default_rng(0)
SGD = Optimiser("sgd", lr=0.2)


def path_by_hand(phi: dict[str, F64], half: int, x: F64) -> F64:
    """One path in training, for vectors (one channel): the mean over the batch ``[L]``."""
    of = {name: value.reshape(2, -1, *value.shape[1:])[half] for name, value in phi.items()}
    p, q = (
        np.exp(weight) / np.exp(weight).sum()
        for weight in (phi["norm.mean_weight"][half], phi["norm.var_weight"][half])
    )
    own_mean, own_var = x.mean(1, keepdims=True), x.var(1, keepdims=True)
    mean = (p[0] + p[1]) * own_mean + p[2] * x.mean()
    var = (q[0] + q[1]) * own_var + q[2] * x.var()
    h = (x - mean) / np.sqrt(var + 1e-5) * of["norm.weight"] + of["norm.bias"]
    z = h @ of["linear.weight"].T
    z = (z - z.mean(0)) / np.sqrt(z.var(0) + 1e-5)
    z = z * of["post.weight"] + of["post.bias"]
    return (1 / (1 + np.exp(-z))).mean(0)


def step_by_hand(
    theta: F64, phi: dict[str, F64], x: F64, y: NDArray[np.int64], budget: int, method: PFedGate
) -> tuple[F64, dict[str, F64], NDArray[np.bool_]]:
    W = np.array([2, 2, 2])

    def gates(phi: dict[str, F64]) -> tuple[F64, F64]:
        return method.gate_max * path_by_hand(phi, 0, x), path_by_hand(phi, 1, x)

    M, G = gates(phi)
    options = [np.array(o) for o in product([0, 1], repeat=3) if o[0] and W @ np.array(o) <= budget]
    I = max(options, key=lambda o: float(o @ G))  # noqa: E741
    spread = np.repeat(M * I, W).reshape(theta.shape)  # (5)
    in_adapted = logit_gradient(x @ (theta * spread).T, y).T @ x
    in_M = (in_adapted * theta).reshape(3, 2).sum(1)  # in M', a block
    weight_M, weight_G = in_M * I, in_M * I * M

    def surrogate(phi: dict[str, F64]) -> float:
        M, G = gates(phi)
        return float(weight_M @ M + weight_G @ G)

    new = {}
    for name, value in phi.items():
        gradient, eps = np.zeros_like(value), 1e-5
        for at in np.ndindex(value.shape):
            moved = [dict(phi), dict(phi)]
            for other, sign in zip(moved, (1, -1), strict=True):
                other[name] = value.copy()
                other[name][at] += sign * eps
            gradient[at] = (surrogate(moved[0]) - surrogate(moved[1])) / (2 * eps)
        new[name] = value - method.lr_gate * gradient
    return theta - method.optimiser.lr * in_adapted * spread, new, I.astype(bool)


W0 = np.array([[0.5, -0.3, 0.2], [0.1, 0.4, -0.6]], dtype=np.float32)
X = [RNG.normal(size=(5, 3)), RNG.normal(size=(6, 3))]
Y = [np.array([0, 1, 1, 0, 1]), np.array([1, 1, 0, 1, 0, 0])]


def vectors(x: F64, y: NDArray[np.int64]) -> Batch:
    return {"x": torch.tensor(x).float(), "labels": torch.tensor(y)}


def test_one_round_of_two_clients() -> None:
    method = PFedGate(
        sparsity=(0.7, 0.5), blocks=3, min_sparsity=0.34, optimiser=SGD, lr_gate=0.5
    )  # fmt: skip
    task = Task(linear_backbone(W0), method.adapt, seed=3)
    server = method.init_server(task, 2, key(0))
    assert list(server) == ["linear.weight"]
    uploads, moves, sent = [], [], []
    for k, (x, y, budget) in enumerate(zip(X, Y, (4, 3), strict=True)):
        private = method.init_client(task, k, key(k))
        assert int(private["gate.budget"]) == budget
        phi = {
            name.removeprefix("gate."): private[name].double().numpy()
            for name in task.trained & private.keys()
        }
        theta, touched = W0.astype(np.float64), np.zeros(3, dtype=bool)
        for _ in range(2):
            theta, phi, kept = step_by_hand(theta, phi, x, y, budget, method)
            touched |= kept
        upload, kept_private, _ = client_round(
            method, task, server, private, [vectors(x, y)] * 2, ClientContext(key(9))
        )
        np.testing.assert_allclose(upload["linear.weight"], theta - W0, atol=1e-5)
        assert upload["touched"].tolist() == touched.tolist()
        for name, value in phi.items():
            np.testing.assert_allclose(kept_private[f"gate.{name}"], value, atol=2e-5)
        uploads.append(upload)
        moves.append((theta - W0).reshape(3, 2))
        sent.append(touched)
    assert sent[0].sum() == 2  # room for two blocks
    assert sent[1].sum() == 1  # and for one
    new = method.aggregate(task, server, stack(uploads), cohort(2.0, 4.0))["linear.weight"]
    weight = np.array([[2.0], [4.0]]) * np.array(sent)  # [c, L]
    total = weight.sum(0)
    mean = (weight[:, :, None] * np.array(moves)).sum(0) / np.where(total, total, 1)[:, None]
    np.testing.assert_allclose(new, W0 + mean.reshape(W0.shape), atol=1e-5)


def cohort(*sizes: float) -> Cohort:
    n = torch.tensor(sizes, dtype=torch.float64)
    return Cohort(tuple(range(len(sizes))), n, 1, key(0))


def test_all_blocks_with_open_gates_is_fedavg() -> None:
    ours, theirs = PFedGate(sparsity=1.0, gate_max=1.0, optimiser=SGD), FedAvg(optimiser=SGD)
    task, state = start(ours)
    set_gates(state, torch.full((35,), 40.0))
    plain = Task(digits_backbone(0.0), theirs.adapt)
    received = {name: state[name] for name in plain.state}
    batches = [pictures(seed=s) for s in range(3)]
    mine, loss = ours.local(task, state, batches, ClientContext(key(0)))
    other, expected = theirs.local(plain, received, batches, ClientContext(key(0)))
    torch.testing.assert_close(loss, expected)
    for name in received:
        torch.testing.assert_close(mine[name], other[name], atol=1e-5, rtol=1e-5)
    shared = {name: mine[name] for name in [*received, "touched"]}
    upload = ours.unpack(task, ours.pack(task, ours.upload(task, received, shared)))
    new = ours.aggregate(task, received, stack([upload, upload]), cohort(1.0, 3.0))
    for name, value in other.items():
        torch.testing.assert_close(new[name], value, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("s", [0.1, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("evaluation", ["batch", "sample", "client"])
def test_the_budget_always_holds(s: float, evaluation: str) -> None:
    for solver, seed in product(("exact", "greedy"), (0, 1)):
        method = PFedGate(
            sparsity=s, solver=solver, evaluation=evaluation,  # type: ignore[arg-type]
            lr_gate=2.0,
        )  # fmt: skip
        task, state = start(method, seed=seed)
        state, _ = method.local(
            task, state, [pictures(seed=s) for s in range(3)], ClientContext(key(0))
        )
        d = sum(state[n].numel() for n in task.trained if not method.is_private(task, n))
        for part in method._parts(pictures(4, seed=7)):
            values, choice = method._inference_gates(task, state, part)
            assert choice.known is not None
            layout = gated_blocks(task)
            selection = select(task.model, layout, choice.known)
            used = adapted(task.model, layout, state, values, selection)
            nonzero = 0
            for name, place, sizes in layout.parts():
                kept = sum(size for v, size in zip(values[place], sizes, strict=True) if v)
                nonzero += kept
                assert (used[name] != 0).sum() <= kept
            assert nonzero <= s * d
        shown = method.client_diagnostics(task, state, pictures(4, seed=7))
        assert shown["sparsity"] <= s
        assert shown["gates"].shape == (35,)


def test_importance_decides_which_blocks_are_kept() -> None:
    method = PFedGate(sparsity=0.3)
    task, state = start(method)
    bias = torch.zeros(70)
    bias[35:] = -8.0
    bias[35 + 16] = 8.0  # the importance of a block of the hidden layer's weight
    state["gate.post.bias"] = bias
    assert method._inference_gates(task, state, pictures())[1].kept[16]
    state["gate.post.bias"] = -bias
    assert not method._inference_gates(task, state, pictures())[1].kept[16]


def test_a_tuple_gives_clients_budgets_in_turn() -> None:
    experiment = parse({"methods": {"pfedgate": {"sparsity": [0.5, 0.1, 1]}}})
    method = experiment.methods["pfedgate"]
    assert isinstance(method, PFedGate)
    assert method.sparsity == (0.5, 0.1, 1.0)
    task, _ = start(method)
    d = sum(task.state[n].numel() for n in task.trained if not n.startswith("gate."))
    budgets = [int(method.init_client(task, k, key(k))["gate.budget"]) for k in range(5)]
    assert budgets == [int(d * s) for s in (0.5, 0.1, 1.0, 0.5, 0.1)]


def test_the_solver_is_the_one_that_is_chosen() -> None:
    task, state = start(PFedGate(min_sparsity=0.05))
    W = gated_blocks(task).W
    state["gate.budget"] = torch.tensor(int(0.4 * W.sum()))
    drawn = np.random.default_rng(0)
    gains = []
    for _ in range(20):
        G = drawn.random(len(W))
        value = {}
        for solver in ("exact", "greedy"):
            method = PFedGate(solver=solver, min_sparsity=0.05)  # type: ignore[arg-type]
            kept = method._choose(task, state, torch.tensor(G)).kept.numpy()
            assert kept @ W <= 0.4 * W.sum()
            value[solver] = float(kept @ G)
        gains.append(value["exact"] - value["greedy"])
    assert min(gains) >= -1e-9
    assert max(gains) > 0.01


def test_the_smallest_sparsity_that_the_message_names_can_be_reached() -> None:
    weight = np.zeros((20, 5), dtype=np.float32)  # 100 parameters, of which 29 are always kept
    method = PFedGate(sparsity=0.1, min_sparsity=0.295)
    task = Task(linear_backbone(weight), method.adapt)
    with pytest.raises(InputError, match=r"hold 29 of 100 .* allowed: 0\.29 or more, or a smaller"):
        check_all(method, task, 2, 2, 1)
    method = PFedGate(sparsity=0.29, min_sparsity=0.295)  # 0.29 * 100 < 29 in floating point
    check_all(method, task, 2, 2, 1)
    assert method.init_client(task, 0, key(0))["gate.budget"] == 29


def test_a_batch_of_one_example_is_not_trained_on() -> None:
    method = PFedGate(optimiser=SGD)
    task, state = start(method)
    alone = pictures(1)
    padded = {**pictures(4), "weight": torch.tensor([1.0, 0, 0, 0])}
    trained, loss = method.local(task, state, [alone, padded], ClientContext(key(0)))
    assert loss == 0
    assert all(trained[name].equal(value) for name, value in state.items())
    received = {n: state[n] for n in method.init_server(task, 2, key(0))}
    shared = {n: trained[n] for n in [*received, "touched"]}
    packed = method.pack(task, method.upload(task, received, shared))
    assert packed["values"].numel() == 0
    upload = method.unpack(task, packed)
    new = method.aggregate(task, received, stack([upload, upload]), cohort(1.0, 1.0))
    assert all(new[name].equal(received[name]) for name in received)


def test_batches_of_one_example_are_refused() -> None:
    method, federation = PFedGate(), digits_federation()
    task = Task(digits_backbone(), method.adapt)
    plan = Plan(rounds=1, local=LocalConfig(batch_size=1))
    with pytest.raises(InputError, match=r"fewer than 2 examples; local\.batch_size is 1"):
        check(method, task, federation, plan)
    check(method, task, federation, replace(plan, local=LocalConfig(batch_size=2)))


def test_only_touched_blocks_travel() -> None:
    method = PFedGate(sparsity=0.3)
    task, state = start(method)
    received = {n: state[n] for n in method.init_server(task, 2, key(0))}
    trained, _ = method.local(task, state, [pictures()], ClientContext(key(0)))
    upload = method.upload(task, received, {n: trained[n] for n in [*received, "touched"]})
    packed = method.pack(task, upload)
    layout = gated_blocks(task)
    assert packed["values"].numel() == layout.W[upload["touched"].numpy()].sum()
    assert packed["values"].numel() <= 0.3 * layout.d
    assert packed["blocks"].dtype == torch.uint8
    assert packed["blocks"].numel() == -(-35 // 8)
    back = method.unpack(task, packed)
    assert back.keys() == upload.keys()
    assert all(back[name].equal(value) for name, value in upload.items())


def test_the_statistics_of_the_shared_model_are_averaged_over_those_who_trained() -> None:
    method = PFedGate()
    task, _ = start(method)
    server = method.init_server(task, 2, key(0))
    uploads = []
    for touched, moved in ((True, 2.0), (False, 0.0), (True, 5.0)):
        delta = {name: torch.full_like(value, moved) for name, value in server.items()}
        uploads.append({**delta, "touched": torch.full((35,), touched)})
    new = method.aggregate(task, server, stack(uploads), cohort(1.0, 7.0, 2.0))
    for name in ("norm.running_mean", "conv.weight"):
        torch.testing.assert_close(new[name] - server[name], torch.full_like(server[name], 4.0))


def test_gates_by_sample_are_those_of_a_batch_of_one() -> None:
    method, batch = PFedGate(evaluation="sample", lr_gate=2.0), pictures(5)
    task, state = start(method)
    state, _ = method.local(task, state, [pictures(seed=2)] * 3, ClientContext(key(0)))
    together = method.predict(task, state, batch)
    by_batch = PFedGate(lr_gate=2.0)
    alone = [
        by_batch.predict(task, state, {n: v[i : i + 1] for n, v in batch.items()}) for i in range(5)
    ]
    torch.testing.assert_close(together, torch.cat(alone))
    assert not torch.allclose(together, by_batch.predict(task, state, batch), atol=1e-4)


def test_the_gating_layer_has_a_learning_rate_of_its_own() -> None:
    moved = []
    for lr_gate in (0.1, 0.2):
        method = PFedGate(sparsity=1.0, lr_gate=lr_gate, optimiser=SGD)
        task, state = start(method)
        trained, _ = method.local(task, state, [pictures()], ClientContext(key(0)))
        names = ("gate.post.bias", "hidden.weight")
        moved.append([trained[name] - state[name] for name in names])
    torch.testing.assert_close(moved[1][0], 2 * moved[0][0], atol=1e-6, rtol=1e-3)
    torch.testing.assert_close(moved[1][1], moved[0][1])


def test_a_chain_of_modules_stays_a_chain() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    method = PFedGate(sparsity=1.0, optimiser=SGD)
    task = Task(Backbone(net, prepare=lambda b: {"input": b["x"]}), method.adapt)
    x = torch.tensor(X[0]).float()
    torch.testing.assert_close(task.model(x), net(x))
    assert set(method.init_server(task, 1, key(0))) == set(net.state_dict())
    state = {**method.init_server(task, 1, key(0)), **method.init_client(task, 0, key(0))}
    _, loss = method.local(task, state, [vectors(X[0], Y[0])], ClientContext(key(0)))
    assert loss > 0


def test_half_precision_gives_nearly_the_same() -> None:
    method = PFedGate(sparsity=0.5)
    found = []
    for precision in ("fp32", "bf16"):
        task = Task(digits_backbone(0.0), method.adapt, precision=precision)  # type: ignore[arg-type]
        state = {**method.init_server(task, 1, key(0)), **method.init_client(task, 0, key(0))}
        trained, _ = method.local(task, state, [pictures()], ClientContext(key(0)))
        found.append(trained["head.weight"] - state["head.weight"])
    assert (found[0] - found[1]).norm() < 0.05 * found[0].norm()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sparsity": 0.1, "min_sparsity": 0.4}, r"0.1 can't be reached.*allowed: 0\.3"),
        ({"sparsity": (0.5, 0.02), "min_sparsity": 0.05}, r"sparsity 0.02 can't be reached"),
        ({"sparsity": 0.0005, "min_sparsity": 0.0, "blocks": 2}, "is room for 0, and the smallest"),
        ({"adaptation": "client"}, "evaluation must be 'client', not 'batch'"),
    ],
)  # fmt: skip
def test_settings_that_do_not_fit_are_refused(fields: dict, message: str) -> None:
    method = PFedGate(**fields)
    task = Task(digits_backbone(), method.adapt)
    with pytest.raises(InputError, match=message):
        check_all(method, task, 4, 4, 10)


@pytest.mark.parametrize(
    "fields",
    [{"sparsity": 1.5}, {"sparsity": [0.5, 0.0]}, {"sparsity": []}, {"blocks": 1},
     {"min_sparsity": 1.0}, {"evaluation": "round"}, {"gate_max": 0}, {"pool": 0},
     {"lr_gate": 0.0}],
)  # fmt: skip
def test_fields_out_of_range_are_refused(fields: dict) -> None:
    with pytest.raises(InputError, match=next(iter(fields))):
        parse({"methods": {"pfedgate": fields}})


def test_there_is_no_global_model() -> None:
    method = PFedGate()
    task, _ = start(method)
    assert method.global_state(task, method.init_server(task, 2, key(0))) is None
    assert isinstance(task.model.get_submodule("gate"), GatingLayer)
