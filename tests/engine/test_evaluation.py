"""Whose models are evaluated, and which results are kept."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest
from torch import Tensor

from fedtailor import random
from fedtailor.data.config import LocalConfig
from fedtailor.engine.config import CohortConfig, EngineConfig, EvaluateConfig, Plan
from fedtailor.engine.prepare import memory_states
from fedtailor.engine.results import Round
from fedtailor.engine.rounds import rounds
from fedtailor.method import Method
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedmerge import FedMerge
from fedtailor.methods.fedsdg import FedSDG
from fedtailor.methods.local import Local
from fedtailor.optim import Optimiser
from fedtailor.params import Batch, Params
from fedtailor.task.task import Task
from tests.small import digits_backbone, digits_federation

FEDERATION = digits_federation()
PLAN = Plan(rounds=2, local=LocalConfig(batch_size=8), cohort=CohortConfig(size=3))


def last_round(method: Method, plan: Plan = PLAN) -> Round:
    *_, last = rounds(method, Task(digits_backbone(), method.adapt), FEDERATION, plan)
    return last


def test_who_is_evaluated_and_when() -> None:
    plan = replace(PLAN, rounds=3, evaluate=EvaluateConfig(every=2, clients=2, global_model=False))
    method = FedAvg()
    task = Task(digits_backbone(), method.adapt)
    found = [done.evaluations for done in rounds(method, task, FEDERATION, plan)]
    assert [len(evaluations) for evaluations in found] == [0, 2, 2]
    assert {e.model for e in found[1]} == {"personal"}
    assert len(found[1][0].clients) == 2


def test_without_anything_personal_the_personal_model_is_the_global_one() -> None:
    found = {(e.model, e.split): e for e in last_round(FedAvg()).evaluations}
    assert found["personal", "test"].loss == found["global", "test"].loss


@dataclass(frozen=True)
class Watched(FedAvg):
    """FedAvg whose server state is sent in a new dict each time; counts what it predicts."""

    copies: bool = False
    calls: list[int] = field(default_factory=list)

    def send(self, task: Task, server: Params, client: int) -> Params:
        return {n: v.clone() if self.copies else v for n, v in server.items()}

    def predict(self, task: Task, state: Params, batch: Batch) -> Tensor:
        self.calls.append(len(batch["labels"]))
        return super().predict(task, state, batch)


def test_the_same_tensors_in_a_new_dict_are_one_model() -> None:
    one, each = Watched(), Watched(copies=True)
    plan = replace(PLAN, engine=EngineConfig("vectorised"))
    assert last_round(one, plan).losses == pytest.approx(last_round(each, plan).losses)
    assert len(one.calls) < len(each.calls)


@pytest.mark.slow
def test_novel_clients_never_take_part_and_are_evaluated_apart() -> None:
    cohort = CohortConfig(novel=2)
    plan = replace(PLAN, rounds=4, cohort=cohort, evaluate=EvaluateConfig(every=4))
    method = FedSDG(optimiser=Optimiser("adam", lr=0.01))
    task = Task(digits_backbone(), method.adapt)
    store = memory_states(method, task, FEDERATION)
    novel = FEDERATION.novel(2)
    assert len(novel) == 2
    for done in rounds(method, task, FEDERATION, plan, store=store):
        assert not novel & set(done.cohort.clients)
        assert len(done.cohort.clients) == 3
    found = {(e.model, e.split): e for e in done.evaluations}
    assert set(found["novel", "test"].clients) == novel
    assert set(found["personal", "test"].clients) == set(range(5)) - novel
    for client in novel:  # what they train to be evaluated is thrown away
        start = method.init_client(task, client, random.key(0, "client", client))
        assert all(store.read(client)[name].equal(start[name]) for name in start)
    unready = replace(plan, evaluate=EvaluateConfig(every=4, novel_passes=0))
    other = last_round(method, unready)
    assert all(done.server[name].equal(other.server[name]) for name in done.server)
    unprepared = {(e.model, e.split): e for e in other.evaluations}
    assert found["personal", "test"] == unprepared["personal", "test"]
    assert found["novel", "test"].loss != unprepared["novel", "test"].loss


@pytest.mark.slow
def test_a_novel_client_finds_its_row_at_the_server_by_its_own_examples() -> None:
    """FedMerge's weights: the mean of the models, which it begins with, is worse for it."""
    losses = []
    for passes in (0, 5):
        plan = replace(
            PLAN,
            rounds=3,
            cohort=CohortConfig(novel=2),
            evaluate=EvaluateConfig(every=3, novel_passes=passes),
        )
        method = FedMerge(models=3, optimiser=Optimiser("sgd", lr=0.3))
        found = {(e.model, e.split): e for e in last_round(method, plan).evaluations}
        losses.append(sum(found["novel", "test"].loss))
    assert losses[1] < losses[0]


def test_unchanged_clients_are_not_evaluated_again() -> None:
    """A client that did not train keeps its numbers, which are those of a fresh look."""
    method = Counted()
    task = Task(digits_backbone(), method.adapt)
    plan = replace(PLAN, cohort=CohortConfig(size=1), engine=EngineConfig("sequential"))
    store = memory_states(method, task, FEDERATION)
    first, second = rounds(method, task, FEDERATION, plan, store=store)
    trained = second.cohort.clients[0]
    before, after = (done.evaluations[1].loss for done in (first, second))
    assert [k for k in range(5) if before[k] != after[k]] == [trained]
    late = replace(plan, evaluate=EvaluateConfig(every=2))
    assert last_round(method, late).evaluations == second.evaluations


@dataclass(frozen=True)
class Counted(Local):
    """Local in cohorts that are drawn, that counts its predictions."""

    trains_alone: ClassVar[bool] = False
    calls: list[int] = field(default_factory=list)

    def predict(self, task: Task, state: Params, batch: dict[str, Tensor]) -> Tensor:
        self.calls.append(len(batch["labels"]))
        return super().predict(task, state, batch)


def test_it_looks_at_trained_clients_alone() -> None:
    method = Counted()
    plan = replace(PLAN, cohort=CohortConfig(size=1), engine=EngineConfig("sequential"))
    task = Task(digits_backbone(), method.adapt)
    seen = []
    for _ in rounds(method, task, FEDERATION, plan):
        seen.append(len(method.calls))
    assert seen == [10, 12]  # two splits of five clients, then of one
