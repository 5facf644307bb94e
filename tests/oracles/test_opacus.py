"""Steps with private records are those of Opacus: `make test-oracles` runs this."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import opacus
import peft
import pytest
import torch
from opacus.accountants import PRVAccountant
from opacus.optimizers import optimizer as of_opacus
from torch import Tensor, nn
from torch.nn import functional as F

import fedtailor as ft
from fedtailor.engine.executors.work import ClientRequest
from fedtailor.engine.prepare import client_works, first_server
from fedtailor.engine.rounds import rounds
from fedtailor.params import DRAWN, Params
from fedtailor.task.backbone import Backbone
from fedtailor.task.records import RecordNoise, SampledBatch, noised_gradient
from fedtailor.uploads.record_accounting import RecordAccount
from tests.oracles.test_prv_accountant import SETTINGS
from tests.small import digits_federation

# what Opacus says of its own draws, and torch of its hooks where pictures need no gradient
pytestmark = [
    pytest.mark.filterwarnings("ignore:Secure RNG turned off"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]
RECORDS, BATCH, ROUNDS, LR, NOISE = 20, 2, 3, 0.05, 0.8
CLIP = {"full": 1.5, "head": 1.2, "lora": 3.0}  # some examples' gradients are longer, others not
EPS_ERROR = 0.01  # which Opacus adds


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(64, 8), nn.Linear(8, 10)

    def forward(self, pixel_values: Tensor) -> Tensor:
        y: Tensor = self.head(torch.tanh(self.hidden(pixel_values.flatten(1))))
        return y


def backbone() -> Backbone:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Backbone(Net(), blocks=(("hidden",),), head=("head",), name="net")


def unit_noise(trained: Params, number: int, noise: RecordNoise) -> Params:
    """What a step adds to a sum, as a multiple of its standard deviation: the step of a batch
    without examples."""
    none = SampledBatch({"labels": torch.zeros(1), DRAWN: torch.zeros(1)}, number, 1)
    of_one = noise._replace(std=1.0, size=torch.ones_like(noise.size))

    def flat(*_: Any) -> tuple[Params, tuple[Tensor, Params]]:
        return {name: torch.zeros_like(v) for name, v in trained.items()}, (torch.zeros(()), {})

    return noised_gradient(flat, none, noise.key, of_one, None)[0]


@pytest.mark.parametrize("trainable", ["full", "head", "lora"])
def test_all_steps_are_those_of_opacus(trainable: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the batches, some of which are empty, and unit noise; it clips, scales the noise,
    divides and steps by itself. Its LoRA is that of PEFT."""
    federation, clip = digits_federation((RECORDS,)), CLIP[trainable]
    method = ft.FedAvg(trainable=trainable, rank=2, optimiser=ft.Optimiser("sgd", lr=LR))
    task = ft.Task(backbone(), method.adapt)
    privacy = ft.PrivacyConfig("record", noise=NOISE, clip=clip)
    plan = ft.Plan(ROUNDS, ft.LocalConfig(batch_size=BATCH), privacy=privacy)
    *_, last = rounds(method, task, federation, plan)

    start = first_server(method, task, federation)
    works = client_works(method, task, federation, plan)
    model: Any = Net()
    if trainable == "lora":
        lora = peft.LoraConfig(r=2, lora_alpha=method.lora_alpha, target_modules=["hidden"])
        model = peft.inject_adapter_in_model(lora, model)
    model.load_state_dict({**task.model.state_dict(), **start})
    for name, value in model.named_parameters():
        value.requires_grad_(name in task.trained)
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    assert set(trained) == set(task.trained)
    rows = torch.utils.data.TensorDataset(torch.zeros(RECORDS))
    engine = opacus.PrivacyEngine()
    private, optimiser, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(trained.values(), lr=LR),
        data_loader=torch.utils.data.DataLoader(rows, batch_size=BATCH),
        noise_multiplier=NOISE,
        max_grad_norm=clip,
    )
    draws: Iterator[Tensor]
    monkeypatch.setattr(of_opacus, "_generate_noise", lambda std, **_: std * next(draws))
    sizes, norms = [], []
    for number in range(1, ROUNDS + 1):
        request = ClientRequest(0, number, {}, "train", 1, 1.0, 1)
        inputs = works.train.prepare(start, request)
        for step, batch in enumerate(inputs.batches):
            drawn = batch[DRAWN] > 0
            optimiser.zero_grad()
            scores = private(batch["pixel_values"][drawn])
            F.cross_entropy(scores, batch["labels"][drawn]).backward()
            unit = unit_noise(trained, step, inputs.context.noise)
            draws = iter([unit[name] for name in trained])
            squares = [p.grad_sample.flatten(1).square().sum(1) for p in trained.values()]
            optimiser.step()
            assert next(draws, None) is None
            sizes.append(int(drawn.sum()))
            norms += sum(squares).sqrt().tolist()
    assert min(sizes) == 0
    assert min(norms) < clip < max(norms)
    for name, value in trained.items():
        torch.testing.assert_close(last.server[name], value.detach(), atol=1e-6, rtol=0)
        assert (last.server[name] - start[name]).abs().max() > 0.1

    account = plan.account(federation)
    assert isinstance(account, RecordAccount)
    assert engine.accountant.history == [(NOISE, loader.sample_rate, account.steps * ROUNDS)]
    assert loader.sample_rate == pytest.approx(account.rate)
    more = engine.get_epsilon(account.delta) - account.spent(ROUNDS).epsilon
    assert 0 < more < EPS_ERROR


@pytest.mark.parametrize(("rate", "noise", "steps", "delta", "_"), SETTINGS)
def test_epsilons_of_opacus_are_a_little_higher(
    rate: float, noise: float, steps: int, delta: float, _: float
) -> None:
    theirs = PRVAccountant()
    theirs.history = [(noise, rate, steps)]
    ours = RecordAccount(noise, delta, 1000, rate, steps // 10, 10).spent(10).epsilon
    assert 1.0004 < theirs.get_epsilon(delta) / ours < 1.0015
