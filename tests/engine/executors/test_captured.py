"""Recorded trainings give the bits of the same trainings as they are. Here a tape records them, as
a CUDA graph does on a GPU: see tests/gpu."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from fedtailor import random
from fedtailor.data.config import LocalConfig
from fedtailor.engine.config import CohortConfig, EvaluateConfig, Plan, ScheduleConfig
from fedtailor.engine.executors.captured import Captured
from fedtailor.engine.executors.vectorised import AdaptiveChunk, Vectorised
from fedtailor.engine.prepare import memory_states
from fedtailor.engine.results import Round
from fedtailor.engine.rounds import rounds
from fedtailor.method import Method
from fedtailor.methods.fedala import FedALA
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedavg_ft import FedAvgFT
from fedtailor.methods.fedhft import FedHFT
from fedtailor.methods.fedmerge import FedMerge
from fedtailor.methods.fedsdg import FedSDG
from fedtailor.methods.fedsq import FedSQ
from fedtailor.methods.pfedgate import PFedGate
from fedtailor.optim import ClientContext, train
from fedtailor.params import Batch, Params, apart
from fedtailor.task.task import Task
from fedtailor.testing import tape
from fedtailor.torch_private import in_each
from fedtailor.uploads.accounting import PrivacyConfig
from tests.small import digits_backbone, digits_federation
from tests.text import tiny_bert, topics_federation


@dataclass
class Counted:
    """Recording by a tape; counts how often tapes are played."""

    recorded: int = 0
    played: int = 0

    def __call__(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], object]]:
        outcome, replay = tape.capture(run)
        self.recorded += 1

        def play() -> None:
            self.played += 1
            replay()

        return outcome, play


def last_round(method: Method, at_once: int, capture: Any, **settings: Any) -> Round:
    task, federation = Task(digits_backbone(), method.adapt), digits_federation((20,) * 6)
    plan = Plan(
        rounds=5,
        local=LocalConfig(batch_size=10),
        cohort=CohortConfig(size=6),
        evaluate=EvaluateConfig(every=5),
        schedule=ScheduleConfig("cosine", within_rounds=True),
    )
    *_, done = rounds(
        method,
        task,
        federation,
        replace(plan, **settings),
        store=memory_states(method, task, federation),
        make_executor=partial(Vectorised, clients_per_step=at_once, capture=capture),
    )
    return done


def same_bits(one: Round, other: Round) -> bool:
    states = one.server.keys() == other.server.keys() and all(
        value.equal(other.server[name]) for name, value in one.server.items()
    )
    return states and one.losses == other.losses and one.evaluations == other.evaluations


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("method", "at_once"),
    [
        (FedAvg(), 3),
        (FedSDG(), 1),
        (FedMerge(), 3),
        pytest.param(FedSQ(), 1, marks=SLOW),
        pytest.param(FedHFT(warmup_rounds=1), 3, marks=SLOW),
        pytest.param(FedALA(), 1, marks=SLOW),  # looks at the round's number
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_run_has_the_same_bits(method: Method, at_once: int) -> None:
    counted = Counted()
    assert same_bits(last_round(method, at_once, counted), last_round(method, at_once, None))
    assert counted.played > 0


def test_noise_in_each_step_is_new_noise() -> None:
    privacy = PrivacyConfig(level="record", noise=1.0, clip=1.0, delta=1e-3, secret=False)
    noised = {"privacy": privacy, "local": LocalConfig(batch_size=20)}  # every example is drawn
    counted, method = Counted(), FedAvg(trainable="head")
    found = last_round(method, 3, counted, **noised)
    assert same_bits(found, last_round(method, 3, None, **noised))
    assert counted.played == 5 * 2 - 2


@dataclass(frozen=True)
class Looks(FedAvg):
    """Trains no more where the loss is low."""

    name: ClassVar[str] = "looks"

    def local(
        self, task: Task, state: Params, batches: Sequence[Batch], context: ClientContext
    ) -> tuple[Params, Tensor]:
        trained, loss = train(task, state, batches, context, self.optimiser)
        return (trained, loss) if loss > 0.1 else (state, loss)


def test_a_training_that_looks_at_values_runs_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    counted = Counted()
    assert same_bits(last_round(Looks(), 1, counted), last_round(Looks(), 1, None))
    assert counted.recorded == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "without CUDA graphs" in line
    assert "test_captured.py, line" in line  # which value it is


def test_a_method_that_says_so_is_not_tried(capsys: pytest.CaptureFixture[str]) -> None:
    counted = Counted()
    last_round(PFedGate(), 1, counted, rounds=1)
    assert counted.recorded == 0
    assert capsys.readouterr().err.count("the method looks at values") == 1


def doubled(received: Params, private: Params, batches: Any, context: ClientContext) -> Tensor:
    return 2 * received["x"] * context.lr_scale


def test_few_recordings_are_kept() -> None:
    counted = Counted()
    captured, context = Captured(counted), ClientContext(random.key(0))
    for size in [*range(1, 11)] * 3:  # ten sizes are more than are kept
        x = torch.full((size,), float(size))
        assert captured(doubled, ({"x": x}, {}, [], context)).equal(2 * x)
    assert (counted.recorded, counted.played) == (8, 8)
    for scale in (0.5, 0.25):  # a number that changes from round to round
        told = context._replace(lr_scale=scale)
        assert captured(doubled, ({"x": torch.ones(1)}, {}, [], told)).tolist() == [2 * scale]


def test_tensors_travel_together() -> None:
    sent = [torch.arange(5), torch.tensor(True), torch.rand(2, 3), torch.zeros(0), torch.ones(())]
    arrived = apart(torch.zeros(5 * 512, dtype=torch.uint8), sent)
    in_each("copy", arrived, sent)
    assert all(a.equal(b) and a.dtype == b.dtype for a, b in zip(arrived, sent, strict=True))


@pytest.mark.parametrize(
    "method",
    [
        FedSDG(),
        *(
            pytest.param(method, marks=SLOW)
            for method in (FedAvg(), FedHFT(warmup_rounds=1), PFedGate(), FedAvgFT())
        ),
    ],
    ids=lambda method: method.name,
)
def test_what_is_done_for_a_gpu_changes_no_number(
    method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer shapes, a second thread, clients that are scored together: all but CUDA itself."""
    cohort, finds_out = CohortConfig(fraction=1.0), Counted()

    def done(at_once: Any, capture: Any) -> Round:
        task, federation = Task(tiny_bert(), method.adapt), topics_federation((16,) * 8)
        plan = Plan(3, LocalConfig(batch_size=8), cohort, evaluate=EvaluateConfig(every=3))
        *_, last = rounds(
            method,
            task,
            federation,
            plan,
            make_executor=partial(Vectorised, clients_per_step=at_once, capture=capture),
        )
        return last

    plain = done(1, None)
    monkeypatch.setattr(Task, "on_gpu", True)
    found = done(AdaptiveChunk(), finds_out)
    assert (finds_out.played > 0) == method.recordable
    for name, value in plain.server.items():
        assert torch.allclose(found.server[name], value, rtol=1e-4, atol=2e-5), name
    for one, other in zip(plain.evaluations, found.evaluations, strict=True):
        assert one.num_examples == other.num_examples
        assert one.loss == pytest.approx(other.loss, abs=2e-4)
