"""Rounds of which some clients' updates are missing: the cohort is cut before anything is
weighted, under methods that stream a mean as under those that stack."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest
import torch

from fedtailor.data.config import LocalConfig
from fedtailor.engine.client import ClientUpdate
from fedtailor.engine.config import EvaluateConfig, Plan
from fedtailor.engine.executors.sequential import Sequential
from fedtailor.engine.executors.work import Refusal, Work
from fedtailor.engine.prepare import memory_states
from fedtailor.engine.results import Round
from fedtailor.engine.rounds import rounds
from fedtailor.errors import DivergedError, InputError
from fedtailor.method import Cohort, FineTuning, Method
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedsdg import FedSDG
from fedtailor.params import Params, stack
from fedtailor.stacked import weighted_sum
from fedtailor.task.task import Task
from fedtailor.uploads.rules import Robust
from tests.small import SIZES, digits_backbone, digits_federation

PLAN = Plan(rounds=1, local=LocalConfig(batch_size=8), evaluate=EvaluateConfig(clients=1))


@dataclass
class Lossy:
    """Real training, one client after the other, of which some results are lost on the way:
    ``refused`` clients' with a reason, ``silent`` ones' without a word; others are ``changed``."""

    works: Mapping[str, Work]
    refused: Mapping[int, Refusal] = field(default_factory=dict)
    silent: frozenset[int] = frozenset()
    changed: Mapping[int, Callable[[Any], Any]] = field(default_factory=dict)
    updates: dict[int, Any] = field(default_factory=dict)

    name = "lossy"
    processes = 1
    concurrency = 1

    def map(self, name: str, server: Params, items: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
        for item, result in Sequential(self.works).map(name, server, items):
            if name == "train" and item.client in self.silent:
                continue
            if name == "train" and item.client in self.refused:
                yield item, self.refused[item.client]
                continue
            if name == "train":
                result = self.changed.get(item.client, lambda update: update)(result)
                self.updates[item.client] = result
            yield item, result

    def close(self) -> None:
        return


def run(method: Method, quorum: float = 0.2, **lost: Any) -> tuple[Round, dict[int, Any], Task]:
    task, federation = Task(digits_backbone(), method.adapt), digits_federation()
    executors: list[Lossy] = []

    def make(works: Mapping[str, Work]) -> Lossy:
        executors.append(Lossy(works, **lost))
        return executors[-1]

    store = memory_states(method, task, federation)
    (done,) = rounds(method, task, federation, PLAN, store=store, make_executor=make, quorum=quorum)
    return done, executors[0].updates, task


@dataclass(frozen=True)
class Uniform(FineTuning):
    """FedAvg with equal weights."""

    name: ClassVar[str] = "uniform"
    family: ClassVar[str] = "global"
    needs_only_mean: ClassVar[bool] = True

    def client_weights(self, cohort: Cohort) -> torch.Tensor:
        return cohort.uniform


@pytest.mark.parametrize("method", [FedAvg(), Uniform()])
def test_a_streamed_mean_is_that_of_those_who_answer(method: Method) -> None:
    done, updates, _ = run(method, silent=frozenset({3}), refused={0: Refusal("late")})
    assert done.cohort.clients == (1, 2, 4)
    assert done.cohort.num_examples.tolist() == [SIZES[k] for k in (1, 2, 4)]
    assert len(done.losses) == len(done.steps) == 3
    weights = torch.tensor([SIZES[k] if isinstance(method, FedAvg) else 1.0 for k in (1, 2, 4)])
    expected = weighted_sum(
        stack([updates[k].packed for k in (1, 2, 4)]), weights.double() / weights.sum()
    )
    for name, value in expected.items():
        torch.testing.assert_close(done.server[name], value, rtol=1e-5, atol=1e-7)


def test_stacked_uploads_are_those_of_who_answers() -> None:
    method = FedSDG(rank=2, aggregation="examples")
    done, updates, task = run(method, refused={2: Refusal("late")})
    assert done.cohort.clients == (0, 1, 3, 4)
    uploads = stack([method.unpack(task, updates[k].packed) for k in (0, 1, 3, 4)])
    shares = done.cohort.num_examples / done.cohort.num_examples.sum()
    assert shares.sum() == pytest.approx(1)
    for name, moved in weighted_sum(uploads, shares).items():
        torch.testing.assert_close(done.server[name], task.state[name] + moved)


def test_a_robust_rule_goes_on_without_a_refused_client() -> None:
    """In a cohort of 2 f + 3: it may have been the false one."""
    method = FedAvg(robust=Robust("krum", attackers=1))
    done, updates, _ = run(method, refused={2: Refusal("damaged")})
    assert done.cohort.clients == (0, 1, 3, 4)
    assert any(updates[k].packed["head.bias"].equal(done.server["head.bias"]) for k in (0, 1, 3, 4))
    assert "4 of 5 uploads are there: the rule withstands 0 false ones, not 1" in done.notes


@pytest.mark.parametrize("robust", [Robust("krum", 1), Robust("multi-krum", 1, keep=4)])
def test_false_statistics_are_bounded_under_a_robust_rule(robust: Robust) -> None:
    name = "norm.running_var"

    def lie(update: ClientUpdate) -> ClientUpdate:
        return replace(update, packed={**update.packed, name: torch.full((6,), -1.0)})

    done, updates, _ = run(FedAvg(robust=robust), changed={3: lie})
    honest = torch.stack([updates[k].packed[name] for k in (0, 1, 2, 4)])
    assert (done.server[name] >= honest.amin(0) - 1e-6).all()
    assert (done.server[name] <= honest.amax(0) + 1e-6).all()


def test_the_bound_on_norms_counts_the_cohort_that_was_drawn() -> None:
    """Of five clients one is away, and one upload is above the bound: three are half of them.
    Where two are away, two are not."""

    def lie(update: ClientUpdate) -> ClientUpdate:
        return replace(update, packed={k: v + 1e20 for k, v in update.packed.items()})

    done, _, _ = run(FedAvg(), changed={3: lie}, silent=frozenset({0}))
    assert done.cohort.clients == (1, 2, 4)
    with pytest.raises(DivergedError, match=r"norms of 1 of 3 uploads .* 2 are left and 3 needed"):
        run(FedAvg(), changed={3: lie}, silent=frozenset({0, 1}))


def test_too_few_answers_end_the_run_and_say_why() -> None:
    silent = frozenset({0, 1, 2})
    with pytest.raises(InputError, match="2 of 5 clients sent a usable update, 3"):
        run(FedAvg(), quorum=0.6, silent=silent)
    diverged = {k: Refusal(f"client {k} has diverged", diverged=True) for k in (0, 1, 2)}
    with pytest.raises(DivergedError, match="client 1 has diverged in round 1 of fedavg"):
        run(FedAvg(), quorum=0.6, refused=diverged)  # the first in training order
