"""Faults in a run: who trains, whose update counts, what it costs, and how long it takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedtailor.data.config import LocalConfig
from fedtailor.engine.config import EngineConfig, Plan
from fedtailor.engine.faults import ClientFaults, FaultConfig, Machine
from fedtailor.engine.prepare import first_costs, memory_states
from fedtailor.engine.results import Round
from fedtailor.engine.rounds import rounds
from fedtailor.errors import InputError
from fedtailor.method import Method
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedper import FedPer
from fedtailor.methods.fedsdg import FedSDG
from fedtailor.task.task import Task
from fedtailor.uploads.rules import Robust
from tests.engine.test_rounds import Spoilt
from tests.small import digits_backbone, digits_federation, last_round, same_bits

FIVE = (24,) * 5  # clients of three batches
LOCAL = LocalConfig(batch_size=8)
FAST = Machine(flops_per_second=1e6, bytes_per_second_down=2000, bytes_per_second_up=1000)
SLOW = Machine(flops_per_second=1e4, bytes_per_second_down=2000, bytes_per_second_up=1000)


def without(*clients: int, **rates: float) -> FaultConfig:
    """Only these clients have faults."""
    return FaultConfig(by_client=(ClientFaults(clients, **rates),))  # type: ignore[arg-type]


def all_rounds(method: Method, **plan: Any) -> list[Round]:
    task, federation = Task(digits_backbone(), method.adapt), digits_federation(FIVE)
    return list(rounds(method, task, federation, Plan(**{"rounds": 2, "local": LOCAL, **plan})))


def test_who_drops_before_training_is_as_if_it_were_not_in_the_cohort() -> None:
    last, store = last_round(FedPer(), FIVE, rounds=1, faults=without(1, 4, drop_before=1.0))
    whole, _ = last_round(FedPer(), FIVE, rounds=1)
    assert last.cohort.clients == (0, 2, 3)
    assert last.losses == tuple(whole.losses[k] for k in (0, 2, 3))
    assert (last.bytes_down * 5, last.bytes_up * 5) == (whole.bytes_down * 3, whole.bytes_up * 3)
    assert last.faults is not None
    assert (last.faults.dropped_before, last.trained, last.trained_steps) == (
        (1, 4), 3, 9
    )  # fmt: skip
    fresh = memory_states(
        FedPer(), Task(digits_backbone(), FedPer().adapt), digits_federation(FIVE)
    )
    assert [same_bits(store.read(k), fresh.read(k)) for k in range(5)] == [
        False, True, False, False, True
    ]  # fmt: skip


@pytest.mark.slow
def test_who_drops_after_training_has_trained_and_sends_nothing() -> None:
    before, _ = last_round(FedPer(), FIVE, rounds=1, faults=without(1, drop_before=1.0))
    after, store = last_round(FedPer(), FIVE, rounds=1, faults=without(1, drop_after=1.0))
    whole, every = last_round(FedPer(), FIVE, rounds=1)
    assert same_bits(after.server, before.server)
    assert not same_bits(after.server, whole.server)
    assert same_bits(store.read(1), every.read(1))
    assert after.bytes_down == whole.bytes_down
    assert after.bytes_up == before.bytes_up
    assert after.faults is not None
    assert (after.faults.dropped_after, after.trained_steps) == ((1,), 15)


@pytest.mark.slow
def test_partial_work_is_the_first_of_the_local_steps() -> None:
    """With a share that is rounded to one step of three, the round is one of a single step."""
    part, _ = last_round(FedAvg(), FIVE, rounds=1, faults=without(*range(5), partial=1e-9))
    done = part.steps
    assert set(done) <= {1, 2, 3}
    assert len(set(done)) > 1
    for client, steps in enumerate(done):
        alone, _ = last_round(
            FedAvg(), FIVE, rounds=1, local=LocalConfig(batch_size=8, steps=steps)
        )
        assert part.losses[client] == alone.losses[client]


def test_a_round_that_nobody_is_left_of_changes_nothing() -> None:
    first, second = all_rounds(FedAvg(), faults=without(*range(5), drop_after=1.0))
    assert same_bits(first.server, second.server)
    assert (first.cohort.clients, first.train_loss, first.bytes_up) == ((), None, 0)
    assert first.notes == ("no upload is there; the server's state stays as it is",)
    (none,) = all_rounds(FedAvg(), rounds=1, faults=FaultConfig(drop_before=1.0))
    assert (none.bytes_down, none.costs, none.cpu_seconds) == (0, None, 0.0)
    assert none.evaluations


def test_too_few_for_a_robust_rule_change_nothing() -> None:
    method = FedAvg(robust=Robust("krum", attackers=1))
    (last,) = all_rounds(method, rounds=1, faults=without(0, 1, 2, drop_before=1.0))
    assert last.cohort.clients == ()
    assert "2 uploads are there" in last.notes[0]


def test_a_robust_rule_tells_how_many_uploads_were_expected() -> None:
    """Before its training one of five has dropped out, after it another one."""
    fates = (ClientFaults((0,), drop_before=1.0), ClientFaults((1,), drop_after=1.0))
    method = FedAvg(robust=Robust("krum", attackers=1))
    (last,) = all_rounds(method, rounds=1, faults=FaultConfig(by_client=fates))
    assert last.notes[0].startswith("3 of 5 uploads are there: the rule withstands 0")


@pytest.mark.slow
@pytest.mark.parametrize("method", [FedPer(), FedSDG()])
def test_processes_and_the_order_of_clients_change_nothing(method: Method) -> None:
    faults = FaultConfig(0.2, 0.2, partial=0.3, deadline=0.5, machines=(FAST, SLOW))
    one, two = (
        last_round(method, FIVE, faults=faults, engine=EngineConfig(executor, processes=2))[0]
        for executor in ("auto", "processes")
    )
    assert same_bits(one.server, two.server)
    assert one.faults == two.faults


@pytest.mark.slow
def test_simulated_seconds_are_those_of_the_slowest_client_in_time() -> None:
    slow = ClientFaults((0, 3), machine=1)
    machines = (FAST, SLOW)

    def round_with(deadline: float | None, *more: ClientFaults) -> Round:
        faults = FaultConfig(deadline=deadline, machines=machines, by_client=more)
        return last_round(FedAvg(), FIVE, rounds=1, faults=faults)[0]

    quick = tuple(ClientFaults((k,), machine=0) for k in (1, 2, 4))
    whole = round_with(None, slow, *quick)
    task, federation = Task(digits_backbone(), FedAvg().adapt), digits_federation(FIVE)
    costs = first_costs(FedAvg(), task, federation, Plan(1, LOCAL))
    assert costs.flops is not None
    link = whole.bytes_down / 5 / 2000 + whole.bytes_up / 5 / 1000
    seconds = {at: 3 * costs.flops / at + link for at in (1e6, 1e4)}
    assert whole.faults is not None
    assert whole.faults.seconds == pytest.approx(seconds[1e4], rel=1e-12)
    deadline = (seconds[1e6] + seconds[1e4]) / 2
    timely = round_with(deadline, slow, *quick)
    assert timely.faults is not None
    assert (timely.faults.seconds, timely.faults.late) == (deadline, (0, 3))
    assert timely.cohort.clients == (1, 2, 4)
    assert "without client 0: its upload came after" in timely.notes[0]
    gone, _ = last_round(FedAvg(), FIVE, rounds=1, faults=without(0, 3, drop_before=1.0))
    assert same_bits(timely.server, gone.server)
    assert timely.bytes_up == whole.bytes_up
    lost = ClientFaults((0, 3), machine=1, drop_after=1.0)
    dropped = round_with(None, lost, *quick)
    assert dropped.faults is not None
    assert dropped.faults.seconds == pytest.approx(
        seconds[1e4] - whole.bytes_up / 5 / 1000, rel=1e-12
    )


@pytest.mark.slow
def test_a_slow_client_that_diverges_takes_its_time_all_the_same() -> None:
    by_client = (ClientFaults((3,), machine=1), ClientFaults((0, 1, 2, 4), machine=0))

    def round_of(method: Method, deadline: float | None = None) -> Round:
        faults = FaultConfig(deadline=deadline, machines=(FAST, SLOW), by_client=by_client)
        skip = EngineConfig(on_divergence="skip")
        return all_rounds(method, rounds=1, faults=faults, engine=skip)[0]

    whole, without_it = (
        round_of(Spoilt(client=9)),
        round_of(Spoilt(client=3)),
    )  # nobody sends anything
    assert without_it.cohort.clients == (0, 1, 2, 4)
    assert whole.faults is not None
    assert without_it.faults is not None
    assert without_it.faults.seconds == whole.faults.seconds
    assert without_it.trained == 5
    cut = round_of(Spoilt(client=3), deadline=1.0).faults
    assert cut is not None
    assert cut.seconds == 1.0
    assert 3 not in cut.late


def test_faults_are_not_for_federations_of_real_sites() -> None:
    from dataclasses import replace

    method = FedAvg()
    task = Task(digits_backbone(), method.adapt)
    remote = replace(digits_federation(FIVE), remote=True)
    with pytest.raises(InputError, match="not over Flower; leave"):
        next(rounds(method, task, remote, Plan(1, faults=FaultConfig(drop_before=0.1))))


def test_rates_are_obeyed_and_clients_have_their_own() -> None:
    own = ClientFaults((3,), drop_before=1.0, drop_after=0.0, partial=1.0)
    faults = FaultConfig(drop_before=0.3, drop_after=0.1, partial=0.4, by_client=(own,))
    fates = [faults.fate(0, round_, client) for round_ in range(1, 101) for client in range(20)]
    others = [fate for at, fate in enumerate(fates) if at % 20 != 3]
    assert np.mean([fate.drops_before for fate in others]) == pytest.approx(0.3, abs=0.03)
    assert np.mean([fate.drops_after for fate in others]) == pytest.approx(0.1, abs=0.03)
    shares = [fate.share for fate in others]
    assert (min(shares) >= 0.4, max(shares) <= 1) == (True, True)
    assert np.mean(shares) == pytest.approx(0.7, abs=0.02)
    assert all(
        (fate.drops_before, fate.drops_after, fate.share) == (True, False, 1.0)
        for fate in fates[3::20]
    )


def test_machines_have_their_shares_of_the_clients() -> None:
    kinds = (Machine(share=3), Machine(share=1), Machine(share=1))
    own = ClientFaults((7, 9), machine=2)
    drawn = FaultConfig(machines=kinds).kinds(0, 20)
    assert np.bincount(drawn).tolist() == [12, 4, 4]
    assert not np.array_equal(drawn, FaultConfig(machines=kinds).kinds(1, 20))
    named = FaultConfig(machines=kinds, by_client=(own,)).kinds(0, 20)
    assert np.flatnonzero(named != drawn).tolist() == [k for k in (7, 9) if drawn[k] != 2]
    assert named[[7, 9]].tolist() == [2, 2]


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        (FaultConfig(deadline=3.0), r"deadline = 3\.0 needs .* \[\[faults.machines\]\]"),
        (FaultConfig(by_client=(ClientFaults((5,)),)), "client 5; the 5 clients are 0 to 4"),
        (FaultConfig(by_client=(ClientFaults((1,)), ClientFaults((1,)))), "client 1 twice"),
        (FaultConfig(by_client=(ClientFaults(),)), "an entry without clients"),
        (FaultConfig(by_client=(ClientFaults((1,), machine=0),)), "machine 0, and there are 0"),
    ],
)
def test_faults_that_do_not_go_together_are_told(faults: FaultConfig, message: str) -> None:
    with pytest.raises(InputError, match=message):
        faults.check(5)
