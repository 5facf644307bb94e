"""Buffered asynchronous aggregation: who is in flight, how stale updates count, and resuming."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor.data.config import LocalConfig
from fedtailor.data.federation import Federation
from fedtailor.engine.asynchronous import Buffered
from fedtailor.engine.config import CohortConfig, EngineConfig, Plan
from fedtailor.engine.faults import ClientFaults, FaultConfig, Machine, TimeModel
from fedtailor.engine.participants import Participants
from fedtailor.engine.prepare import first_server
from fedtailor.engine.rounds import rounds
from fedtailor.errors import InputError
from fedtailor.method import Method
from fedtailor.methods import METHODS
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedper import FedPer
from fedtailor.methods.fedsdg import FedSDG
from fedtailor.task.task import Task
from fedtailor.uploads.rules import Robust
from tests.small import digits, digits_backbone, digits_federation, last_round, same_bits

FIVE = (24,) * 5  # clients of three batches
LOCAL = LocalConfig(batch_size=8)
EQUAL = FaultConfig(machines=(Machine(flops_per_second=1e6),))
MIXED = FaultConfig(machines=(Machine(0.6, 1e6), Machine(0.4, 2e5)))


def schedule(seconds: list[int], concurrency: int, buffer: int, **faults: Any) -> Buffered:
    """Client k needs ``seconds[k]``: one FLOP a step, three steps."""
    machines = tuple(Machine(flops_per_second=3 / one) for one in seconds)
    own = tuple(ClientFaults((k,), machine=k) for k in range(len(seconds)))
    plan = Plan(
        9,
        LOCAL,
        CohortConfig(size=concurrency, buffer=buffer),
        faults=FaultConfig(machines=machines, by_client=own, **faults),
    )
    federation = digits_federation((24,) * len(seconds))
    time = TimeModel(machines, np.arange(len(seconds)), 1, 0, 0)
    return Buffered(federation, plan, time)


def seen(found: Participants) -> tuple[list[tuple[int, int]], float | None, tuple[int, ...]]:
    return [(one.client, one.version) for one in found.members], found.seconds, found.versions


def test_the_schedule_is_that_of_a_calculation_by_hand() -> None:
    """Three clients need 1, 2 and 5 seconds; all are in flight, and two uploads fill the buffer."""
    rounds_ = schedule([1, 2, 5], 3, 2)
    # 0 comes at 1 and waits for the next state; 1 comes at 2
    assert seen(rounds_.next_round(1)) == ([(0, 0), (1, 0)], 2.0, (0,))
    # at 2 both get state 1; 0 comes at 3, 1 at 4
    assert seen(rounds_.next_round(2)) == ([(0, 1), (1, 1)], 2.0, (0,))
    # at 4 both get state 2; 0 and the slow one come at 5, and 1 is left in flight
    assert seen(rounds_.next_round(3)) == ([(0, 2), (2, 0)], 1.0, (2,))
    # at 5 both get state 3; 0 and 1 come at 6
    assert seen(rounds_.next_round(4)) == ([(0, 3), (1, 2)], 1.0, (3,))


def test_a_deadline_ends_a_flight() -> None:
    first = schedule([1, 2, 50], 3, 3, deadline=4.0).next_round(1)
    assert [(one.client, one.late) for one in first.members] == [(0, False), (1, False), (2, True)]
    assert first.seconds == 4.0


@pytest.mark.slow
def test_a_buffer_for_all_clients_is_the_synchronous_round() -> None:
    cohort = CohortConfig(buffer=5)
    for method in (FedAvg(), FedPer()):
        plain, kept = last_round(method, FIVE, rounds=3)
        for faults in (EQUAL, MIXED):
            last, store = last_round(method, FIVE, rounds=3, cohort=cohort, faults=faults)
            assert same_bits(last.server, plain.server)
            assert last.losses == plain.losses
            assert all(same_bits(store.read(k), kept.read(k)) for k in range(5))


def test_stale_updates_count_by_the_root_of_their_staleness() -> None:
    """The third round by hand, from what a client trains of the state that it was sent."""
    fast, slow = Machine(flops_per_second=1e6), Machine(flops_per_second=2.5e5)
    faults = FaultConfig(
        machines=(fast, slow),
        by_client=(ClientFaults((0, 1), machine=0), ClientFaults((2,), machine=1)),
    )
    method, federation = FedAvg(), digits_federation((24,) * 3)
    task = Task(digits_backbone(), method.adapt)
    plan = Plan(4, LOCAL, CohortConfig(buffer=2), faults=faults)
    done = list(rounds(method, task, federation, plan))
    stale = next(one for one in done if one.faults and any(one.faults.staleness or ()))
    assert stale.faults is not None
    assert stale.faults.staleness is not None
    states = [first_server(method, task, federation), *(one.server for one in done)]

    def trained(client: int, version: int) -> dict[str, torch.Tensor]:
        """What the client alone makes of the state after that round."""
        alone = without_others(federation, client)
        todo = rounds(
            method, task, alone, Plan(9, LOCAL), server=states[version], start=version + 1
        )
        return next(todo).server

    now = states[stale.number - 1]
    expected = {name: torch.zeros_like(value).double() for name, value in now.items()}
    for client, staleness in zip(stale.cohort.clients, stale.faults.staleness, strict=True):
        version = stale.number - 1 - staleness
        upload = trained(client, version)
        for name, value in upload.items():
            if name in task.buffers or not value.is_floating_point():
                counted = value.double()
            else:
                change = value.double() - states[version][name].double()
                counted = now[name].double() + change / math.sqrt(1 + staleness)
            expected[name] += counted / 2
    for name, value in expected.items():
        if now[name].is_floating_point():
            torch.testing.assert_close(stale.server[name].double(), value, rtol=1e-5, atol=1e-7)


def without_others(federation: Federation, client: int) -> Federation:
    """The federation with no cohort but this client: all others are novel."""

    class Alone(Federation):
        def cohort(self, *_: object, **__: object) -> tuple[int, ...]:
            return (client,)

    return Alone(federation.dataset, federation.partition, federation.seed)


@pytest.mark.slow
def test_processes_change_nothing() -> None:
    cohort = CohortConfig(size=3, buffer=2)
    one, two = (
        last_round(
            FedPer(), FIVE, rounds=4, cohort=cohort, faults=MIXED,
            engine=EngineConfig(executor, processes=2),
        )[0]
        for executor in ("auto", "processes")
    )  # fmt: skip
    assert same_bits(one.server, two.server)


EXPERIMENT = ft.Experiment(
    methods={"fedper": FedPer()},
    rounds=6,
    split=ft.SplitConfig(6),
    local=ft.LocalConfig(steps=2),
    cohort=ft.CohortConfig(size=4, buffer=2),
    faults=replace(MIXED, drop_before=0.1, drop_after=0.1, partial=0.5),
)
FOLDER = Path("methods/fedper/seed-0")


def files(out: Path) -> dict[str, bytes]:
    skip = {"timings.jsonl", "commit.json"}
    return {p.name: p.read_bytes() for p in (out / FOLDER).iterdir() if p.name not in skip}


@pytest.mark.slow
@pytest.mark.parametrize("round_", [2, 5])
def test_a_run_that_stops_goes_on_with_the_same_bits(tmp_path: Path, round_: int) -> None:
    def run(out: Path, stop: int = 0, rounds: int = 6) -> Path:
        stopped = (lambda done: ft.STOP if done.number == stop else None) if stop else None
        experiment = replace(EXPERIMENT, rounds=rounds)
        return ft.run(
            experiment, out, data=digits(), backbone=digits_backbone(), on_round=stopped
        ).path

    whole = run(tmp_path / "whole")
    part = run(tmp_path / "part", stop=round_)
    assert files(part).keys() != files(whole).keys()
    assert files(run(part)) == files(whole)
    longer = run(tmp_path / "longer", rounds=round_)
    assert files(run(longer)) == files(whole)


@pytest.mark.slow
def test_no_method_that_averages_sends_what_has_no_place_in_the_servers_state() -> None:
    """Else a stale upload would be taken for an update, and be made smaller."""
    for kind in METHODS.values():
        method = kind()
        if not method.needs_only_mean or method.sends_updates:
            continue
        task = Task(digits_backbone(), method.adapt)
        server = first_server(method, task, digits_federation(FIVE))
        received = method.send(task, server, 0)
        shared = {n: v for n, v in received.items() if not method.is_private(task, n)}
        upload = method.upload(task, received, shared)
        assert upload.keys() <= server.keys(), method.name
        assert all(upload[n].shape == server[n].shape for n in upload), method.name


@pytest.mark.parametrize(
    ("method", "cohort", "faults", "message"),
    [
        (FedAvg(), CohortConfig(buffer=2), FaultConfig(), r"add \[\[faults.machines\]\]"),
        (FedAvg(), CohortConfig(buffer=6), EQUAL, "buffer = 6 is more than the 5 clients"),
        (FedSDG(), CohortConfig(buffer=2), EQUAL, "methods that average; fedsdg needs"),
        (
            FedAvg(robust=Robust("median", attackers=1)),
            CohortConfig(buffer=2),
            EQUAL,
            "at least 3 clients; a round has 2;",
        ),
        (FedAvg(), CohortConfig(buffer=2, max_share=0.3), EQUAL, "at least 1/2; allowed: 0.5"),
    ],
)
def test_what_does_not_go_together_is_told(
    method: Method, cohort: CohortConfig, faults: FaultConfig, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        last_round(method, FIVE, cohort=cohort, faults=faults)
