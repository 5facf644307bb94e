"""LG-FedAvg by hand: private linear bodies, a shared head, two clients, in NumPy."""

import numpy as np
import pytest

from fedtailor.errors import InputError
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedper import FedPer
from fedtailor.methods.lg_fedavg import LGFedAvg
from fedtailor.optim import Optimiser
from fedtailor.task.task import Task
from tests.golden import X, Y, one_round, two_layer_backbone, two_layer_gradients
from tests.small import last_round, same_bits

U = np.array([[0.1, -0.2], [0.3, 0.4], [-0.5, 0.2]], dtype=np.float32)
V = np.array([[0.2, -0.3, 0.5], [-0.1, 0.4, 0.6]], dtype=np.float32)
SGD = Optimiser("sgd", lr=0.05, momentum=0.9)


def test_one_round_averages_the_head_over_private_bodies() -> None:
    eta = 0.5
    method = LGFedAvg(optimiser=Optimiser("sgd", lr=eta))
    task = Task(two_layer_backbone(U, V), method.adapt)
    private = [{"body.weight": task.state["body.weight"] + shift} for shift in (0.1, -0.2)]
    head, bodies = np.zeros_like(V, dtype=np.float64), []
    for share, x, y, body in zip([0.25, 0.75], X, Y, [U + 0.1, U - 0.2], strict=True):
        u, v = body.astype(np.float64), V.astype(np.float64)
        for _ in range(3):
            du, dv = two_layer_gradients(u, v, x, y)
            u, v = u - eta * du, v - eta * dv
        head += share * v
        bodies.append(u)
    server = method.init_server(task, 2, None)
    assert server.keys() == {"head.weight"}
    server, kept = one_round(method, task, server, private)
    np.testing.assert_allclose(server["head.weight"].numpy(), head, atol=1e-6)
    for own, u in zip(kept, bodies, strict=True):
        np.testing.assert_allclose(own["body.weight"].numpy(), u, atol=1e-6)
    assert method.global_state(task, server) is None


def test_sharing_everything_is_fedavg() -> None:
    found = []
    for method in (LGFedAvg(shared=("*",), optimiser=SGD), FedAvg(optimiser=SGD)):
        task = Task(two_layer_backbone(U, V), method.adapt)
        found.append(one_round(method, task, task.state, [{}, {}])[0])
    assert same_bits(*found)


@pytest.mark.slow
def test_the_shared_part_can_be_chosen_and_the_rest_is_private() -> None:
    ours, store = last_round(LGFedAvg(shared=("conv", "norm", "hidden"), optimiser=SGD))
    theirs, other = last_round(FedPer(optimiser=SGD))  # its head is what is left
    assert same_bits(ours.server, theirs.server)
    assert all(same_bits(store.read(client), other.read(client)) for client in range(5))


def test_lora_stays_with_the_client() -> None:
    last, store = last_round(LGFedAvg(trainable="lora", rank=2))
    assert last.server.keys() == {"head.weight", "head.bias"}
    assert store.read(0).keys() == {f"hidden.lora_{f}.default.weight" for f in "AB"}


def test_a_part_that_leaves_nothing_to_split_is_refused() -> None:
    with pytest.raises(InputError, match=r"shared = \['\*'\] matches all of .*; allowed"):
        last_round(LGFedAvg(shared=("*",)))
    with pytest.raises(InputError, match=r"shared = the task head matches all of what is trained"):
        last_round(LGFedAvg(trainable="head"))
