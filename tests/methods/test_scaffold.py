"""SCAFFOLD by hand: softmax regression, two of three clients, three rounds, in NumPy."""

import numpy as np
import pytest
import torch

from fedtailor.engine.config import CohortConfig, Plan
from fedtailor.engine.rounds import rounds
from fedtailor.errors import InputError
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.scaffold import Scaffold
from fedtailor.optim import ClientContext, Optimiser
from fedtailor.params import Params, strip_prefix
from fedtailor.random import key
from fedtailor.runs.experiment import parse
from fedtailor.task.task import Task
from tests.golden import X, Y, batch_of, linear_backbone, one_round, softmax_gradient
from tests.small import check_all, digits_backbone, digits_federation, last_round, same_bits

W = np.array([[0.1, -0.2], [0.3, 0.4]], dtype=np.float32)
ETA, K, N = 0.5, 3, 3


@pytest.mark.parametrize(
    ("option", "method"),
    [
        ("II", Scaffold(optimiser=Optimiser(lr=ETA))),
        ("I", Scaffold("gradient", optimiser=Optimiser(lr=ETA))),
        ("II", Scaffold("steps", server_lr=0.6, weights="examples", optimiser=Optimiser(lr=ETA))),
    ],
)
def test_three_rounds_follow_algorithm_1(option: str, method: Scaffold) -> None:
    p, eta_g = ([0.25, 0.75], 0.6) if method.weights == "examples" else ([0.5, 0.5], 1.0)
    x, c, own = W.astype(np.float64), np.zeros((2, 2)), [np.zeros((2, 2))] * 2
    task = Task(linear_backbone(W), method.adapt)
    server = method.init_server(task, N, key(0))
    private = [method.init_client(task, client, key(client)) for client in (0, 1)]
    for _ in range(3):
        step, change = np.zeros((2, 2)), np.zeros((2, 2))
        for i in (0, 1):
            y = x
            for _ in range(K):
                y = y - ETA * (softmax_gradient(y, X[i], Y[i]) - own[i] + c)
            new = (x - y) / (K * ETA) + own[i] - c
            if option == "I":
                new = softmax_gradient(x, X[i], Y[i])
            step, change = step + p[i] * (y - x), change + (new - own[i])
            own = [new, own[1]] if i == 0 else [own[0], new]
        x, c = x + eta_g * step, c + change / N
        server, private = one_round(method, task, server, private, K)
    np.testing.assert_allclose(server["linear.weight"].numpy(), x, atol=1e-6)
    np.testing.assert_allclose(server["scaffold.c.linear.weight"].numpy(), c, atol=1e-6)
    for i in (0, 1):
        found = private[i]["scaffold.own.linear.weight"].numpy()
        np.testing.assert_allclose(found, own[i], atol=1e-6)
    shown = method.global_state(task, server)
    assert shown is not None
    assert shown.keys() == task.state.keys()


def close(a: Params, b: Params, tolerance: float) -> None:
    for name, value in b.items():
        torch.testing.assert_close(a[name], value, atol=tolerance, rtol=tolerance)


def test_the_first_local_training_is_fedavgs() -> None:
    ours, theirs = Scaffold(), FedAvg()
    task = Task(digits_backbone(), ours.adapt)
    received = ours.send(task, ours.init_server(task, 3, key(0)), 0)
    state = {**received, **ours.init_client(task, 0, key(0))}
    batches = [digits_federation().batch(np.arange(at, at + 4)) for at in (0, 4)]
    mine, _ = ours.local(task, state, batches, ClientContext(key(1)))
    plain, _ = theirs.local(task, task.state, batches, ClientContext(key(1)))
    assert same_bits({name: mine[name] for name in plain}, plain)


@pytest.mark.slow
def test_a_round_of_equal_clients_and_any_round_of_one_client_are_fedavgs() -> None:
    for sizes, number in (((16, 16, 16), 1), ((20,), 3)):
        ours, _ = last_round(Scaffold(), sizes, rounds=number)
        theirs, _ = last_round(FedAvg(), sizes, rounds=number)
        close(ours.server, theirs.server, 1e-5)
    later, _ = last_round(Scaffold(), (16, 16, 16), rounds=2)
    plain, _ = last_round(FedAvg(), (16, 16, 16), rounds=2)
    assert (later.server["hidden.weight"] - plain.server["hidden.weight"]).abs().max() > 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("variates", ["steps", "gradient"])
def test_c_is_the_mean_of_all_variates_whoever_takes_part(variates: str) -> None:
    method = Scaffold(variates)  # type: ignore[arg-type]
    last, store = last_round(method, rounds=3, cohort=CohortConfig(size=2))
    own = [strip_prefix(store.read(client), "scaffold.own.") for client in range(5)]
    mean = {name: torch.stack([c_i[name] for c_i in own]).mean(0) for name in own[0]}
    assert max(value.abs().max() for value in mean.values()) > 0.01
    close(strip_prefix(last.server, "scaffold.c."), mean, 1e-5)


def test_after_a_single_step_both_options_agree() -> None:
    found = []
    for method in (Scaffold(), Scaffold("gradient")):
        task = Task(linear_backbone(W), method.adapt)
        server = method.init_server(task, 2, key(0))
        state = {**method.send(task, server, 0), **method.init_client(task, 0, key(0))}
        trained, _ = method.local(task, state, [batch_of(1)], ClientContext(key(0), lr_scale=0.5))
        found.append(strip_prefix(trained, "scaffold.own."))
    close(*found, 1e-5)


def test_option_2_needs_plain_sgd() -> None:
    federation, plan = digits_federation(), Plan(rounds=1)
    for optimiser, named in (
        (Optimiser(momentum=0.9), "sgd, momentum 0.9"),
        (Optimiser("adam"), "adam"),
        (Optimiser(clip=10.0), "sgd, clip 10.0"),
    ):
        method = Scaffold(optimiser=optimiser)
        task = Task(digits_backbone(), method.adapt)
        with pytest.raises(InputError, match=rf"plain SGD; the optimiser is {named}; allowed"):
            next(rounds(method, task, federation, plan))
        check_all(Scaffold("gradient", optimiser=optimiser), task, 5, 5, 1)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(InputError, match=r"variates = 'both'.*steps.*gradient"):
        parse({"methods": {"scaffold": {"variates": "both"}}})


def test_what_is_trained_has_variates() -> None:
    method = Scaffold(trainable="lora", rank=2, lora_alpha=8.0)
    task = Task(digits_backbone(), method.adapt)
    assert strip_prefix(method.init_client(task, 0, key(0)), "scaffold.own.").keys() == task.trained
    B = "hidden.lora_B.default.weight"
    A, scaled = method.lora(task, {**task.state, B: task.state[B] + 1})["hidden"]
    assert len(A) == 2
    assert scaled.max() == 4.0
    whole = Scaffold(layers=("norm",))  # running statistics are averaged, but have no variates
    task = Task(digits_backbone(), whole.adapt)
    server = whole.init_server(task, 2, key(0))
    assert strip_prefix(server, "scaffold.c.").keys() == {"norm.weight", "norm.bias"}
    last, _ = last_round(Scaffold(layers=("norm",), server_lr=0.1), (16, 16), rounds=1)
    plain, _ = last_round(FedAvg(layers=("norm",)), (16, 16), rounds=1)
    name = "norm.running_mean"
    torch.testing.assert_close(last.server[name], plain.server[name], atol=1e-6, rtol=1e-6)
    assert not torch.allclose(last.server["norm.weight"], plain.server["norm.weight"])
