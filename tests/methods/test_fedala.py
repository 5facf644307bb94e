"""FedALA by hand: softmax regression, two clients whose own models differ from the server's."""

import numpy as np
import pytest
import torch

from fedtailor.errors import InputError
from fedtailor.methods.fedala import FedALA, trained_layers
from fedtailor.methods.fedavg import FedAvg
from fedtailor.optim import ClientContext, Optimiser
from fedtailor.params import Params
from fedtailor.random import key
from fedtailor.runs.experiment import parse
from fedtailor.task.task import Task
from tests.golden import X, Y, batch_of, linear_backbone, one_round, softmax_gradient
from tests.small import digits_backbone, last_round

THETA = np.array([[0.1, -0.2], [0.3, 0.4]], dtype=np.float32)
OWN = [np.array([[0.5, 0.1], [-0.6, 0.9]]), np.array([[-0.4, 0.3], [0.2, -1.0]])]
W = [np.array([[1.0, 0.9], [0.5, 0.0]]), np.array([[0.2, 1.0], [0.97, 0.4]])]
OWN_NAME, W_NAME = "fedala.own", "fedala.weights"
SGD = Optimiser("sgd", lr=0.05, momentum=0.9)


def kept_before() -> list[Params]:
    return [
        {OWN_NAME: torch.tensor(own).float().flatten(), W_NAME: torch.tensor(w).float().flatten()}
        for own, w in zip(OWN, W, strict=True)
    ]


def learned(client: int, steps: int, eta: float) -> tuple[np.ndarray, np.ndarray]:
    """W and Theta^ after ``steps`` steps of W."""
    own, w = OWN[client], W[client]
    for _ in range(steps):
        mix = own + (THETA - own) * w
        g = softmax_gradient(mix, X[client], Y[client]) * (THETA - own)
        w = np.clip(w - eta * g, 0, 1)
    return w, own + (THETA - own) * w


# of three steps, a share of 0.6 is two; only round 2 takes more passes
@pytest.mark.parametrize(("number", "sample", "steps"), [(3, 0.6, 2), (3, 1.0, 3), (2, 0.6, 10)])
def test_one_round_follows_the_equations(number: int, sample: float, steps: int) -> None:
    alpha, eta = 0.5, 0.7
    method = FedALA(eta=eta, sample=sample, start_passes=5, optimiser=Optimiser("sgd", lr=alpha))
    task = Task(linear_backbone(THETA), method.adapt)
    expected, owns, weights = np.zeros((2, 2)), [], []
    for client, share in enumerate([0.25, 0.75]):
        w, theta = learned(client, steps, eta)
        for _ in range(3):
            theta = theta - alpha * softmax_gradient(theta, X[client], Y[client])
        expected += share * theta
        owns.append(theta)
        weights.append(w)
    server, kept = one_round(method, task, task.state, kept_before(), number=number)
    np.testing.assert_allclose(server["linear.weight"].numpy(), expected, atol=1e-6)
    for after, own, w in zip(kept, owns, weights, strict=True):
        np.testing.assert_allclose(after[OWN_NAME].numpy(), own.flatten(), atol=1e-6)
        np.testing.assert_allclose(after[W_NAME].numpy(), w.flatten(), atol=1e-6)
    assert any((w == bound).any() for w in weights for bound in (0, 1))  # some are cut off


def test_in_use_is_the_mix_before_it_is_trained() -> None:
    method = FedALA(eta=0.7, sample=1.0, optimiser=SGD)
    task = Task(linear_backbone(THETA), method.adapt)
    state = {**task.state, **kept_before()[1]}
    used = method.finetune(task, state, [batch_of(1)] * 2, ClientContext(key(0), round=2))
    assert used.keys() == task.state.keys()
    np.testing.assert_allclose(used["linear.weight"].numpy(), learned(1, 2, 0.7)[1], atol=1e-6)
    assert method.finetune_passes == 1


@pytest.mark.slow
def test_with_weights_that_stay_1_it_is_fedavg() -> None:
    ours = last_round(FedALA(eta=0.0, mixed_layers=2, optimiser=SGD), rounds=3)[0]
    theirs = last_round(FedAvg(optimiser=SGD), rounds=3)[0]
    for name, value in theirs.server.items():
        torch.testing.assert_close(ours.server[name], value, atol=1e-5, rtol=1e-5)
    assert ours.losses == pytest.approx(theirs.losses, abs=1e-5)


@pytest.mark.slow
def test_in_round_1_the_received_model_is_taken() -> None:
    ours, store = last_round(FedALA(optimiser=SGD), rounds=1)
    theirs = last_round(FedAvg(optimiser=SGD), rounds=1)[0]
    assert ours.losses == theirs.losses
    assert bool((store.read(0)[W_NAME] == 1).all())


def test_the_uppermost_trained_layers_are_mixed() -> None:
    assert trained_layers(Task(digits_backbone())) == [
        ["conv.weight", "norm.bias", "norm.weight"],
        ["hidden.bias", "hidden.weight"],
        ["head.bias", "head.weight"],
    ]

    def mixed(method: FedALA) -> int:
        task = Task(digits_backbone(), method.adapt)
        return method.init_client(task, 0, key(0))[OWN_NAME].numel()

    assert mixed(FedALA()) == 10 * 17
    assert mixed(FedALA(mixed_layers=2)) == 10 * 17 + 16 * 55
    assert mixed(FedALA(layers=("conv", "hidden"))) == 16 * 55
    assert mixed(FedALA(trainable="lora", rank=2, mixed_layers=2)) == 10 * 17 + 2 * (54 + 16)


def test_bad_input_is_refused() -> None:
    with pytest.raises(InputError, match=r"mixed_layers = 4; allowed: 1 to 3, the layers of 'dig"):
        last_round(FedALA(mixed_layers=4))
    with pytest.raises(InputError, match=r"fedala\.sample = 1\.5.*less than or equal to 1"):
        parse({"methods": {"fedala": {"sample": 1.5}}})
    with pytest.raises(InputError, match=r"fedala\.eta = -1.*greater than or equal to 0"):
        parse({"methods": {"fedala": {"eta": -1}}})


def test_padding_steps_do_not_add_to_the_sample() -> None:
    method = FedALA(sample=0.5)
    task = Task(linear_backbone(THETA), method.adapt)
    state = {**task.state, **kept_before()[1]}
    real = {**batch_of(1), "weight": torch.ones(3)}
    padding = {name: torch.zeros_like(value) for name, value in real.items()}
    found = [
        method.local(task, state, [real] * 4 + [padding] * added, ClientContext(key(0)))[0]
        for added in (0, 4)
    ]
    assert found[0][W_NAME].equal(found[1][W_NAME])
    np.testing.assert_allclose(found[0][W_NAME].numpy(), learned(1, 2, 1.0)[0].flatten(), atol=1e-6)
