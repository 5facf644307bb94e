"""FedPer by hand: a linear body and head, two clients, three steps each, in NumPy."""

import numpy as np
import pytest

from fedtailor.errors import InputError
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedper import FedPer
from fedtailor.methods.local import Local
from fedtailor.optim import Optimiser
from fedtailor.runs.experiment import parse
from fedtailor.task.task import Task
from tests.golden import X, Y, one_round, two_layer_backbone, two_layer_gradients
from tests.small import last_round, same_bits

U = np.array([[0.1, -0.2], [0.3, 0.4], [-0.5, 0.2]], dtype=np.float32)
V = np.array([[0.2, -0.3, 0.5], [-0.1, 0.4, 0.6]], dtype=np.float32)
SGD = Optimiser("sgd", lr=0.05, momentum=0.9)


def test_one_round_averages_the_body_and_leaves_the_heads_where_they_are() -> None:
    eta = 0.5
    method = FedPer(optimiser=Optimiser("sgd", lr=eta))
    task = Task(two_layer_backbone(U, V), method.adapt)
    heads = [V + 0.1, V - 0.2]
    private = [{"head.weight": task.state["head.weight"] + shift} for shift in (0.1, -0.2)]
    body, trained = np.zeros_like(U, dtype=np.float64), []
    for share, x, y, head in zip([0.25, 0.75], X, Y, heads, strict=True):
        u, v = U.astype(np.float64), head.astype(np.float64)
        for _ in range(3):
            du, dv = two_layer_gradients(u, v, x, y)
            u, v = u - eta * du, v - eta * dv
        body += share * u
        trained.append(v)
    server = method.init_server(task, 2, None)
    assert server.keys() == {"body.weight"}
    server, kept = one_round(method, task, server, private)
    np.testing.assert_allclose(server["body.weight"].numpy(), body, atol=1e-6)
    for own, v in zip(kept, trained, strict=True):
        np.testing.assert_allclose(own["head.weight"].numpy(), v, atol=1e-6)
    assert method.global_state(task, server) is None


@pytest.mark.slow
def test_with_nothing_private_it_is_fedavg() -> None:
    ours, _ = last_round(FedPer(private=None, optimiser=SGD, layers=("h*", "norm")))
    theirs, _ = last_round(FedAvg(optimiser=SGD, layers=("h*", "norm")))
    assert same_bits(ours.server, theirs.server)


def test_with_everything_private_it_is_local() -> None:
    backbone = two_layer_backbone(U, V)
    found = []
    for method in (FedPer(private=("*",), optimiser=SGD), Local(optimiser=SGD)):
        task = Task(backbone, method.adapt)
        server, kept = one_round(method, task, {}, [task.state, task.state])
        assert server == {}
        found.append(kept)
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.slow
def test_any_part_can_be_private_and_takes_its_statistics_along() -> None:
    last, store = last_round(FedPer(private=("conv", "norm"), optimiser=SGD))
    assert last.server.keys() == {
        f"{m}.{p}" for m in ("hidden", "head") for p in ("weight", "bias")
    }
    assert store.read(0).keys() == {
        "conv.weight", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"
    }  # fmt: skip
    last, store = last_round(FedPer(private=("*.lora_B",), trainable="lora", rank=2))
    assert store.read(0).keys() == {"hidden.lora_B.default.weight"}
    assert not any("lora_B" in name for name in last.server)


def test_a_part_that_leaves_nothing_to_split_is_refused() -> None:
    for method in (FedPer(trainable="head"), FedPer(private=("*",))):
        with pytest.raises(InputError, match=r"private = .* matches all of .*; allowed"):
            last_round(method)
    with pytest.raises(InputError, match="'haed' names no part of model 'digits net'"):
        last_round(FedPer(private=("haed",)))


def test_a_file_says_none_for_nothing_private() -> None:
    experiment = parse({"methods": {"fedper": {"private": "none"}}})
    assert experiment.methods["fedper"] == FedPer(private=None)
    with pytest.raises(InputError, match=r"methods\.fedper\.private = 'head'"):
        parse({"methods": {"fedper": {"private": "head"}}})
