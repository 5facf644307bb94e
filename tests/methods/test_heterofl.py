"""HeteroFL by hand: one hidden layer of two units, of which the second client holds one."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedtailor.engine.client import client_round
from fedtailor.engine.costs import wire_bytes
from fedtailor.errors import InputError
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.heterofl import HeteroFL
from fedtailor.optim import ClientContext, Optimiser
from fedtailor.random import key
from fedtailor.runs.experiment import parse
from fedtailor.task.backbone import Backbone
from fedtailor.task.task import Task
from tests.golden import X, Y, linear_backbone, logit_gradient, one_round
from tests.small import digits_backbone, last_round, same_bits

Matrix = NDArray[np.float64]
W1 = np.array([[0.6, 0.4], [-0.5, 0.7]])
W2 = np.array([[0.3, -0.2], [-0.4, 0.5]])
ETA = 0.5


class Hidden(nn.Module):
    """Logits W2 relu(W1 x)."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = (nn.Linear(2, 2, bias=False) for _ in "12")
        self.hidden.weight = nn.Parameter(torch.tensor(W1).float())
        self.head.weight = nn.Parameter(torch.tensor(W2).float())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.relu(self.hidden(x)))
        return y


def make(**fields: object) -> tuple[HeteroFL, Task]:
    method = HeteroFL(optimiser=Optimiser("sgd", lr=ETA), **fields)  # type: ignore[arg-type]
    return method, Task(Backbone(Hidden(), head=("head",)), method.adapt)


def trained(units: int, client: int, scaler: bool) -> tuple[Matrix, Matrix]:
    """W1 and W2 of a client with ``units`` hidden units, after three steps."""
    U, V = W1[:units], W2[:, :units]
    factor = 2 / units if scaler else 1.0
    for _ in range(3):
        z = factor * X[client] @ U.T
        G = logit_gradient(np.maximum(z, 0) @ V.T, Y[client])
        back = (G @ V) * (z > 0) * factor
        U, V = U - ETA * back.T @ X[client], V - ETA * G.T @ np.maximum(z, 0)
    return U, V


@pytest.mark.parametrize("weights", ["uniform", "examples"])
@pytest.mark.parametrize("scaler", [True, False])
def test_one_round_averages_what_each_holds(weights: str, scaler: bool) -> None:
    method, task = make(widths=(1.0, 0.5), weights=weights, scaler=scaler)
    (U0, V0), (U1, V1) = trained(2, 0, scaler), trained(1, 1, scaler)
    p = (0.5, 0.5) if weights == "uniform" else (0.25, 0.75)
    W1_new, W2_new = U0.copy(), V0.copy()  # the second unit: the first client's alone
    W1_new[0] = p[0] * U0[0] + p[1] * U1[0]
    W2_new[:, 0] = p[0] * V0[:, 0] + p[1] * V1[:, 0]
    server, kept = one_round(method, task, task.state, [{}, {}])
    assert kept == [{}, {}]
    np.testing.assert_allclose(server["hidden.weight"].numpy(), W1_new, atol=1e-6)
    np.testing.assert_allclose(server["head.weight"].numpy(), W2_new, atol=1e-6)


def test_what_nobody_holds_stays() -> None:
    method, task = make(widths=(0.5,))
    server, _ = one_round(method, task, task.state, [{}, {}])
    assert server["hidden.weight"][1].equal(task.state["hidden.weight"][1])
    assert server["head.weight"][:, 1].equal(task.state["head.weight"][:, 1])
    assert not server["hidden.weight"][0].equal(task.state["hidden.weight"][0])
    assert method.global_state(task, server) is server


def test_a_sub_model_is_used_as_it_was_trained() -> None:
    batch = {"x": torch.tensor(X[1]).float()}
    for scaler, factor in ((True, 2.0), (False, 1.0)):
        method, task = make(widths=(1.0, 0.5), scaler=scaler)
        slice_submodel = method.send(task, task.state, 1)
        assert slice_submodel["hidden.weight"].shape == (1, 2)
        z = factor * np.maximum(X[1] @ W1[:1].T, 0) @ W2[:, :1].T
        np.testing.assert_allclose(method.predict(task, slice_submodel, batch), z, atol=1e-6)
        whole = method.predict(task, method.send(task, task.state, 0), batch)
        assert whole.equal(task.logits(task.state, batch))


@pytest.mark.slow
def test_full_widths_weighted_by_examples_are_fedavg() -> None:
    sgd = Optimiser("sgd", lr=0.05, momentum=0.9)
    theirs, _ = last_round(FedAvg(optimiser=sgd))
    for widths in ((1.0,), (1.0, 1.0)):
        ours, _ = last_round(HeteroFL(widths=widths, weights="examples", optimiser=sgd))
        assert ours.server.keys() == theirs.server.keys()
        for name, value in theirs.server.items():
            torch.testing.assert_close(ours.server[name], value, atol=1e-6, rtol=1e-6)
        assert (ours.bytes_down, ours.bytes_up) == (theirs.bytes_down, theirs.bytes_up)
    uniform, _ = last_round(HeteroFL(widths=(1.0,), optimiser=sgd))
    assert not same_bits(uniform.server, ours.server)


@pytest.mark.slow
def test_bytes_shrink_with_the_width() -> None:
    widths = (1.0, 0.5, 0.25, 0.1)
    method = HeteroFL(widths=widths)
    task = Task(digits_backbone(), method.adapt)
    batch = {"pixel_values": torch.rand(4, 1, 8, 8), "labels": torch.arange(4)}
    down, up = [], []
    for client in range(4):
        received = method.send(task, task.state, client)
        upload, _, _ = client_round(method, task, received, {}, [batch], ClientContext(key(client)))
        down.append(wire_bytes(received)["float32"])
        up.append(wire_bytes(method.pack(task, upload))["float32"])
    assert down == up
    assert all(small < large for large, small in pairwise(down))
    assert down[1] < 0.35 * down[0]  # both axes of the largest weight
    slice_submodel, _ = last_round(HeteroFL(widths=(0.25,)))
    whole, _ = last_round(FedAvg())
    assert slice_submodel.bytes_down < 0.5 * whole.bytes_down
    assert slice_submodel.bytes_up < 0.5 * whole.bytes_up


def test_only_chosen_layers_are_trained_and_cut() -> None:
    method = HeteroFL(widths=(0.5,), layers=("h*",))
    task = Task(digits_backbone(), method.adapt)
    received = method.send(task, task.state, 0)
    assert received["hidden.weight"].shape == (8, 54)
    assert received.keys() == {"hidden.weight", "hidden.bias", "head.weight", "head.bias"}


def test_a_model_without_hidden_layers_is_refused() -> None:
    method = HeteroFL()
    task = Task(linear_backbone(np.eye(2, dtype=np.float32)), method.adapt)
    with pytest.raises(InputError, match=r"no trained layer .* width.*allowed.*\[1\.0\]"):
        method.check(task, 2, 2, 1)
    HeteroFL(widths=(1.0,)).check(task, 2, 2, 1)


@pytest.mark.parametrize("widths", [[0.0], [0.5, 1.5], []])
def test_widths_outside_0_to_1_are_refused(widths: list[float]) -> None:
    with pytest.raises(InputError, match=r"methods\.heterofl\.widths = \[.*"):
        parse({"methods": {"heterofl": {"widths": widths}}})


def test_units_that_a_client_does_not_have_are_no_change_of_them() -> None:
    """So that the norms of narrow clients' uploads are like those of others."""
    done, _ = last_round(HeteroFL(widths=(1.0, 0.5), optimiser=Optimiser("sgd", lr=1e-4)), rounds=1)
    assert max(done.norms) < 20 * min(done.norms)
