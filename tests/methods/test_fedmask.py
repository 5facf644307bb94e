"""FedMask by hand: one masked layer of four weights, two clients, three steps each, in NumPy."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from fedtailor.engine.costs import wire_bytes
from fedtailor.errors import InputError
from fedtailor.methods.fedmask import FedMask, retain
from fedtailor.optim import ClientContext, Optimiser
from fedtailor.params import Params, decode, encode
from fedtailor.random import key
from fedtailor.runs.experiment import parse
from fedtailor.task.backbone import Backbone
from fedtailor.task.task import Task
from fedtailor.uploads.rules import Robust
from tests.golden import X, Y, batch_of, linear_backbone, logit_gradient, one_round
from tests.small import check_all, digits_backbone, last_round

Matrix = NDArray[np.float64]
Mask = NDArray[np.bool_]
W = np.array([[0.9, -0.6], [-0.7, 0.8]], dtype=np.float32)
ETA, TAU, START = 4.0, 0.6, 0.2
MIDDLE = float(np.log(TAU / (1 - TAU)))
ALL = np.ones((2, 2), dtype=bool)


def sigmoid(s: Matrix) -> Matrix:
    return 1 / (1 + np.exp(-s))


def trained(s: Matrix, kept: Mask, client: int) -> Matrix:
    """Scores after three steps."""
    for _ in range(3):
        m = kept * (sigmoid(s) >= TAU)
        G = logit_gradient(X[client] @ (W * m).T, Y[client]).T @ X[client]
        s = s - ETA * G * W * kept * sigmoid(s) * (1 - sigmoid(s))
    return s


def left(s: Matrix, drop: int) -> Mask:
    """All but the ``drop`` least scores."""
    return s.ravel().argsort().argsort().reshape(s.shape) >= drop


def merged(s: Matrix, kept: Mask, mask: Mask, shared: Mask) -> Matrix:
    wrong = kept & shared & ((sigmoid(s) >= TAU) != mask)
    return np.where(wrong, 2 * MIDDLE - s, s)


def make(**fields: Any) -> tuple[FedMask, Task]:
    chosen = {"sparsity": 0.25, "structure": "elements", "threshold": TAU, "start": START, **fields}
    method = FedMask(optimiser=Optimiser("sgd", lr=ETA), **chosen)
    return method, Task(linear_backbone(W), method.adapt)


@pytest.mark.parametrize(("sparsity", "consensus"), [(0.0, 0.5), (0.25, 0.5), (0.25, 1.0)])
def test_two_rounds(sparsity: float, consensus: float) -> None:
    method, task = make(sparsity=sparsity, consensus=consensus)
    s = [np.full((2, 2), MIDDLE + START)] * 2
    kept, mask, shared = [ALL, ALL], ALL, ~ALL
    server = method.init_server(task, 2, key(0))
    private: list[Params] = [method.init_client(task, k, key(k)) for k in (0, 1)]
    for number in (1, 2):
        s = [trained(merged(s[k], kept[k], mask, shared), kept[k], k) for k in (0, 1)]
        if number == 1:
            kept = [left(scores, int(4 * sparsity)) for scores in s]
        votes = np.stack([kept[k] & (sigmoid(s[k]) >= TAU) for k in (0, 1)]).sum(0)
        both = kept[0] & kept[1]
        mask, shared = np.where(both, votes >= 2 * consensus, mask), shared | both
        server, private = one_round(method, task, server, private, number=number)
        for k in (0, 1):
            np.testing.assert_allclose(private[k]["linear.scores"].numpy(), s[k], atol=1e-5)
            np.testing.assert_array_equal(private[k]["linear.kept"].numpy(), kept[k])
        np.testing.assert_array_equal(server["mask.linear"].numpy(), mask)
        np.testing.assert_array_equal(server["shared.linear"].numpy(), shared)
    # with pruning, each drops the one element that it masks, on which they disagree
    assert mask.all() == (sparsity > 0 and consensus < 1)
    assert (sigmoid(s[0]) >= TAU).any()
    for k in (0, 1):  # in use, a client takes over what it has in common with the others
        state = {**method.send(task, server, k), **private[k]}
        m = kept[k] & (sigmoid(merged(s[k], kept[k], mask, shared)) >= TAU)
        logits = method.predict(task, state, batch_of(k))
        np.testing.assert_allclose(logits.numpy(), X[k] @ (W * m).T, atol=1e-6)


def test_only_bits_travel() -> None:
    method = FedMask()
    task = Task(digits_backbone(), method.adapt)
    weights = sum(task.state[f"{path}.scores"].numel() for path in ("hidden", "head"))
    assert weights == 16 * 54 + 10 * 16
    assert task.trained == {"hidden.scores", "head.scores"}
    last, _ = last_round(method, rounds=1)
    assert last.costs.down.keys() == {"uint8", "header"}
    assert last.costs.up.keys() == {"uint8", "header"}
    assert last.costs.down["uint8"] == 2 * weights / 8
    hidden, head = 16 * 44, 10 * 13  # with 44 of 54 and 13 of 16 inputs left
    assert last.costs.up["uint8"] == weights / 8 + hidden / 8 + -(-head // 8)
    whole, _ = last_round(FedMask(sparsity=0.0), rounds=1)
    assert whole.costs.up["uint8"] == weights / 8


def test_packed_masks_arrive_as_they_were() -> None:
    method = FedMask(sparsity=0.3, structure="elements")
    task = Task(digits_backbone(), method.adapt)
    upload = {}
    for number, path in enumerate(("hidden", "head")):
        drawn = torch.rand(task.state[f"{path}.kept"].shape)
        upload |= {f"retained.{path}": drawn > 0.3, f"mask.{path}": drawn > 0.5 + 0.1 * number}
    arrived = method.unpack(task, decode(encode(method.pack(task, upload))))
    assert all(arrived[name].equal(value) for name, value in upload.items())
    assert sum(wire_bytes(method.pack(task, upload)).values()) < 1024 * 2 / 8 + 400


def test_whole_inputs_are_pruned_together() -> None:
    scores = torch.arange(24.0).view(2, 3, 2, 2)
    kept = retain(scores, 0.4, "inputs")
    assert kept.shape == scores.shape
    assert [kept[:, i].all().item() for i in range(3)] == [False, True, True]
    assert not kept[:, 0].any()
    assert retain(scores, 0.29, "elements").sum() == 24 - 6
    assert retain(torch.rand(100, 1), 0.29, "elements").sum() == 71
    method = FedMask(sparsity=0.5)
    _, store = last_round(method, rounds=1)
    columns = store.read(0)["hidden.kept"].all(0)
    assert columns.sum() == 27
    assert store.read(0)["hidden.kept"].any(0).equal(columns)


@pytest.mark.slow
def test_the_pruning_happens_once() -> None:
    _, first = last_round(FedMask(), rounds=1)
    _, third = last_round(FedMask(), rounds=3)
    for client in (0, 2):
        one, three = first.read(client), third.read(client)
        assert one["hidden.kept"].equal(three["hidden.kept"])
        assert not one["hidden.scores"].equal(three["hidden.scores"])


def test_a_new_client_starts_from_the_shared_mask() -> None:
    method, task = make(sparsity=0.0)
    server = {
        "mask.linear": torch.tensor([[True, False], [False, True]]),
        "shared.linear": torch.tensor([[True, True], [False, True]]),
    }
    state = method.global_state(task, server)
    assert state is not None
    assert state.keys() == task.state.keys()
    expected = X[1] @ (W * np.array([[1, 0], [1, 1]])).T  # what isn't shared is in use
    logits = method.predict(task, state, batch_of(1))
    np.testing.assert_allclose(logits.numpy(), expected, atol=1e-6)
    new = {**method.send(task, server, 5), **method.init_client(task, 5, key(5))}
    assert method.predict(task, new, batch_of(1)).equal(logits)


def test_layers_are_chosen_by_pattern_and_convolutions_are_masked() -> None:
    method = FedMask(layers=("conv", "head"))
    task = Task(digits_backbone(), method.adapt)
    assert task.trained == {"conv.scores", "head.scores"}
    start = task.state["conv.scores"]
    batch = {"pixel_values": torch.rand(8, 1, 8, 8), "labels": torch.arange(8)}
    private = method.init_client(task, 0, key(0))
    state = {**method.send(task, method.init_server(task, 2, key(0)), 0), **private}
    new, _ = method.local(task, state, [batch] * 4, ClientContext(key(0)))
    assert not new["conv.scores"].equal(start)
    sent = {f"{part}.{path}" for part in ("mask", "retained") for path in ("conv", "head")}
    assert new.keys() == private.keys() | sent


def test_what_cannot_be_masked_is_refused() -> None:
    net = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2))
    with pytest.raises(InputError, match=r"layers \['0'\] holds no linear layer or convolution"):
        Task(Backbone(net), FedMask(layers=("0",)).adapt)
    with pytest.raises(InputError, match="names no layer of model"):
        Task(Backbone(net), FedMask(layers=("body",)).adapt)
    method, task = make()
    with pytest.raises(InputError, match="the cohort has 1; allowed: 2 or more"):
        check_all(method, task, 5, 1, 1)
    for alone in (Robust("krum"), Robust("multi-krum", keep=1), Robust("multi-krum", attackers=1)):
        with pytest.raises(InputError, match=rf"robust\.rule = '{alone.rule}' leaves one upload"):
            check_all(FedMask(robust=alone), task, 5, 4, 1)
    check_all(FedMask(robust=Robust("multi-krum")), task, 5, 4, 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [("sparsity", 1.0), ("threshold", 0.0), ("start", 0.0), ("consensus", 1.5), ("structure", "x")],
)
def test_values_out_of_range_are_refused(field: str, value: object) -> None:
    with pytest.raises(InputError, match=rf"methods\.fedmask\.{field} = .*should be"):
        parse({"methods": {"fedmask": {field: value}}})
