"""Which executor `auto` takes; what it does is tested with the engine and the methods."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedtailor.data.config import LocalConfig
from fedtailor.engine.config import CohortConfig, EngineConfig, Plan
from fedtailor.engine.executors.auto import Auto
from fedtailor.engine.executors.choose import executor_for, share_executor
from fedtailor.engine.executors.processes import Processes
from fedtailor.engine.executors.sequential import Sequential
from fedtailor.engine.executors.vectorised import Vectorised
from fedtailor.engine.executors.work import Executor
from fedtailor.engine.rounds import rounds
from fedtailor.methods.fedavg import FedAvg
from fedtailor.params import Params
from fedtailor.store.trial import TrialStore
from fedtailor.task.task import Task
from tests.small import digits_backbone, digits_federation

CPU = torch.device("cpu")


class Nothing:
    """Work that is never done here."""

    def one(self, server: Params, item: Any) -> None:
        raise AssertionError


def test_how_many_clients_share_a_step() -> None:
    gpu = torch.device("cuda")

    def found(device: torch.device, chosen: str | None = None, **engine: Any) -> Executor:
        config = EngineConfig("vectorised", **engine)
        return executor_for(config, {"nothing": Nothing()}, device, 10, chosen)

    assert (found(CPU).concurrency, found(CPU).name) == (5, "vectorised")
    assert found(gpu, clients_per_step=7).concurrency == 7
    assert (found(gpu).concurrency, found(gpu).name) == (1, "vectorised")  # it is found out
    one = executor_for(EngineConfig("sequential"), {"nothing": Nothing()}, gpu, 10)
    assert (one.concurrency, one.name) == (1, "sequential")
    shared = share_executor(EngineConfig(), {"nothing": Nothing()}, gpu, 2)
    assert (shared.concurrency, shared.name) == (5, "vectorised")
    again = found(gpu, "vectorised-32")
    assert (again.concurrency, again.name) == (32, "vectorised-32")
    auto = executor_for(EngineConfig(), {"nothing": Nothing()}, gpu, 10, "vectorised-32")
    assert auto.name == "vectorised-32"


def chosen_for(cohort: int, device: torch.device = CPU, **engine: Any) -> Executor:
    return executor_for(EngineConfig(**engine), {"nothing": Nothing()}, device, cohort)


def test_where_there_is_nothing_to_choose_auto_is_sequential() -> None:
    assert isinstance(chosen_for(10, processes=1), Sequential)
    assert isinstance(chosen_for(1, processes=2), Sequential)
    assert isinstance(chosen_for(3, processes=8), Sequential)  # five cores would be idle
    assert isinstance(chosen_for(4, processes=8), Auto)
    assert isinstance(chosen_for(4, torch.device("cuda")), Vectorised)
    assert isinstance(chosen_for(1, executor="processes"), Processes)


def test_a_choice_is_remembered_in_the_run_directory(tmp_path: Path) -> None:
    method, federation = FedAvg(), digits_federation()
    task = Task(digits_backbone(), method.adapt)
    plan = Plan(2, LocalConfig(steps=1), CohortConfig(size=2), engine=EngineConfig(processes=2))
    folder = TrialStore(tmp_path, 2)
    assert folder.executor is None
    store = folder.open_states(method, task, federation)
    folder.restore(store)
    done = next(rounds(method, task, federation, plan, store=store))
    assert done.executor is None  # so little work: nothing has been chosen
    folder.commit(replace(done, executor="processes"))
    again = TrialStore(tmp_path, 2)
    assert again.executor == "processes"
    server = again.restore(store)
    *_, last = rounds(
        method, task, federation, plan, store=store, server=server, start=2,
        executor=again.executor,
    )  # fmt: skip
    assert last.executor == "processes"
    again.commit(last)
    lines = (tmp_path / "timings.jsonl").read_text().splitlines()
    assert [json.loads(line)["executor"] for line in lines] == ["processes", "processes"]
