"""FedRep by hand: a linear body and head, two clients, head steps and then body steps, in NumPy."""

import numpy as np
import pytest

from fedtailor.errors import InputError
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedrep import FedRep
from fedtailor.optim import Optimiser
from fedtailor.runs.experiment import parse
from fedtailor.task.task import Task
from tests.golden import X, Y, one_round, two_layer_backbone, two_layer_gradients
from tests.small import last_round, same_bits

U = np.array([[0.1, -0.2], [0.3, 0.4], [-0.5, 0.2]], dtype=np.float32)
V = np.array([[0.2, -0.3, 0.5], [-0.1, 0.4, 0.6]], dtype=np.float32)


@pytest.mark.parametrize(("head_passes", "lr_private"), [(1, None), (3, None), (2, 0.1)])
def test_one_round_follows_algorithm_1(head_passes: int, lr_private: float | None) -> None:
    alpha = 0.5
    sgd = Optimiser("sgd", lr=alpha)
    method = FedRep(head_passes=head_passes, lr_private=lr_private, optimiser=sgd)
    task = Task(two_layer_backbone(U, V), method.adapt)
    body, heads = np.zeros_like(U, dtype=np.float64), []
    for share, x, y in zip([0.25, 0.75], X, Y, strict=True):
        phi, h = U.astype(np.float64), V.astype(np.float64)
        for _ in range(head_passes * 2):
            h = h - (lr_private or alpha) * two_layer_gradients(phi, h, x, y)[1]
        for _ in range(2):
            phi = phi - alpha * two_layer_gradients(phi, h, x, y)[0]
        body += share * phi
        heads.append(h)
    private = method.init_client(task, 0, None)
    server = method.init_server(task, 2, None)
    server, kept = one_round(method, task, server, [private, private], steps=2)
    assert server.keys() == {"body.weight"}
    np.testing.assert_allclose(server["body.weight"].numpy(), body, atol=1e-6)
    for own, h in zip(kept, heads, strict=True):
        assert own.keys() == {"head.weight"}
        np.testing.assert_allclose(own["head.weight"].numpy(), h, atol=1e-6)


@pytest.mark.slow
def test_without_a_head_it_is_fedavg() -> None:
    sgd = Optimiser("sgd", lr=0.05, momentum=0.9)
    ours, _ = last_round(FedRep(private=None, optimiser=sgd))
    theirs, _ = last_round(FedAvg(optimiser=sgd))
    assert same_bits(ours.server, theirs.server)


@pytest.mark.slow
def test_the_private_part_can_be_chosen() -> None:
    last, store = last_round(FedRep(private=("h*",), head_passes=2))
    assert store.read(0).keys() == {
        f"{m}.{p}" for m in ("hidden", "head") for p in ("weight", "bias")
    }
    assert all(name.startswith(("conv.", "norm.")) for name in last.server)


def test_bad_input_is_refused() -> None:
    with pytest.raises(InputError, match=r"fedrep\.head_passes = 0.*greater than 0"):
        parse({"methods": {"fedrep": {"head_passes": 0}}})
    with pytest.raises(InputError, match=r"private = the task head matches all of what is trained"):
        last_round(FedRep(trainable="head"))
