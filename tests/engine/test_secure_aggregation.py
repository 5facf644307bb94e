"""Secure aggregation in the loop: the plain run's numbers, clients that leave, who is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedtailor.engine.checks import check, check_plan
from fedtailor.engine.config import CohortConfig, EngineConfig, Plan
from fedtailor.engine.faults import ClientFaults, FaultConfig
from fedtailor.engine.prepare import first_costs, memory_states
from fedtailor.engine.rounds import rounds
from fedtailor.errors import InputError
from fedtailor.method import Method
from fedtailor.methods import METHODS
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedper import FedPer
from fedtailor.methods.fedprox import FedProx
from fedtailor.methods.fedsdg import FedSDG
from fedtailor.params import Params, encode, flat
from fedtailor.task.task import Task
from fedtailor.uploads.accounting import PrivacyConfig
from fedtailor.uploads.attacks import AttackConfig
from fedtailor.uploads.rules import Robust
from fedtailor.uploads.secure.config import SecureAggregationConfig
from fedtailor.uploads.secure.simulation import Simulation
from tests.engine.test_norm_bound import lying
from tests.engine.test_privacy import FEDERATION, server_after
from tests.engine.test_privacy import PLAN as PRIVATE
from tests.small import digits_backbone, digits_federation, last_round, same_bits

SECURE = SecureAggregationConfig(0.51)
SIZES = (9, 3, 12, 1, 7)
PLAIN = CohortConfig(above_norm="keep")  # as with secure aggregation
# a step of the mean of five, of whom half may be left; and float32's own
NEAR = 8.0 * 7 / 2**31 / 0.5 + 2e-7


def is_near(a: Params, b: Params) -> bool:
    return a.keys() == b.keys() and all(
        float((a[name].double() - b[name].double()).abs().max()) <= NEAR for name in a
    )


@pytest.mark.parametrize(
    "method",
    [
        FedSDG(),
        pytest.param(FedSDG(aggregation="uniform"), marks=pytest.mark.slow),
        pytest.param(FedSDG(aggregation="examples"), marks=pytest.mark.slow),
        pytest.param(FedProx(), marks=pytest.mark.slow),
    ],
)
def test_a_round_is_the_plain_one_to_a_step(method: Method) -> None:
    """Running statistics among what is sent."""
    made = last_round(method, SIZES, rounds=1, secure_aggregation=SECURE)[0]
    plain = last_round(method, SIZES, rounds=1, cohort=PLAIN)[0]
    assert is_near(made.server, plain.server)
    if not method.weighs_by_mean:
        assert made.bytes_up == plain.bytes_up  # an int32 is as long as a float32
    assert not made.notes


def test_both_passes_are_counted_as_they_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every client: the mean goes down again, its update and its weight go up again."""
    passes, reweigh = list[tuple[Params, Params]](), Simulation.reweigh

    def watched(clients: Simulation, setting: Any, masks: Any, mean: Params, uploads: Any) -> Any:
        sent = reweigh(clients, setting, masks, mean, uploads)
        passes.extend((mean, one) for one in sent.values())
        return sent

    monkeypatch.setattr(Simulation, "reweigh", watched)
    method = FedSDG()
    made = last_round(method, SIZES, rounds=1, secure_aggregation=SECURE)[0]
    plain = last_round(method, SIZES, rounds=1, cohort=PLAIN)[0]
    assert len(passes) == len(SIZES)
    assert made.bytes_down == plain.bytes_down + sum(len(encode(mean)) for mean, _ in passes)
    assert made.bytes_up == plain.bytes_up + sum(len(encode(sent)) for _, sent in passes)
    assert made.costs is not None
    assert sum(made.costs.up.values()) * len(SIZES) == made.bytes_up
    assert {*made.costs.up} == {"int32", "header"}
    task, federation = Task(digits_backbone(), method.adapt), digits_federation(SIZES)
    before = first_costs(method, task, federation, Plan(1, secure_aggregation=SECURE))
    assert (before.down, before.up) == (made.costs.down, made.costs.up)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["processes", "vectorised"])
def test_executors_give_the_same_sums(executor: Any) -> None:
    one = last_round(FedAvg(), SIZES, secure_aggregation=SECURE)[0]
    engine = EngineConfig(executor, processes=2)
    other = last_round(FedAvg(), SIZES, secure_aggregation=SECURE, engine=engine)[0]
    if executor == "processes":
        assert same_bits(one.server, other.server)
    for name, value in one.server.items():
        assert float((value - other.server[name]).abs().max()) < 1e-5


def test_clients_that_leave_after_their_training_leave_the_mean_of_the_others() -> None:
    one = ClientFaults((0,), drop_before=1.0), ClientFaults((4, 5), drop_after=1.0)
    faults = FaultConfig(by_client=one)
    options: dict[str, Any] = {"faults": faults, "rounds": 1, "cohort": PLAIN}
    sizes = (9, 3, 12, 1, 7, 4, 5)
    plain = last_round(FedAvg(), sizes, **options)[0]
    assert plain.faults.dropped_before == (0,)
    assert plain.faults.dropped_after == (4, 5)
    made = last_round(FedAvg(), sizes, secure_aggregation=SECURE, **options)[0]
    assert made.cohort.clients == plain.cohort.clients
    assert is_near(made.server, plain.server)

    most = SecureAggregationConfig(1.0)
    stopped = last_round(FedAvg(), sizes, secure_aggregation=most, **options)[0]
    assert not stopped.cohort.clients
    (note,) = stopped.notes
    assert note == (
        "secure aggregation: keys of 6 of 7 clients are there; 7 must stay; the server's state "
        "stays as it is"
    )


def test_of_those_that_were_drawn_enough_stay_to_the_end_of_a_second_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of six, five must stay: one leaves in the first pass, and none or one in the second."""
    faults = FaultConfig(by_client=(ClientFaults((0,), drop_after=1.0),))
    secure, leaving, reweigh = SecureAggregationConfig(0.7), set[int](), Simulation.reweigh

    def left(clients: Simulation, setting: Any, masks: Any, mean: Params, uploads: Any) -> Any:
        stay = {k: one for k, one in masks.items() if k not in leaving}
        return reweigh(clients, setting, stay, mean, uploads)

    monkeypatch.setattr(Simulation, "reweigh", left)
    done = []
    options: dict[str, Any] = {"faults": faults, "secure_aggregation": secure, "rounds": 1}
    for gone in (set[int](), {1}):
        leaving |= gone
        done.append(last_round(FedSDG(), (9, 3, 12, 1, 7, 4), **options)[0])
    assert done[0].cohort.clients == (1, 2, 3, 4, 5)
    assert not done[1].cohort.clients
    assert done[1].notes == (
        "secure aggregation: values of 4 of 6 clients are there; 5 must stay; the server's state "
        "stays as it is",
    )


def test_of_a_round_that_comes_to_nothing_no_client_keeps_anything() -> None:
    faults = FaultConfig(by_client=(ClientFaults((0,), drop_after=1.0),))
    everybody = SecureAggregationConfig(1.0)
    options: dict[str, Any] = {"faults": faults, "secure_aggregation": everybody, "rounds": 1}
    method = FedPer()
    done, store = last_round(method, SIZES, **options)
    assert not done.cohort.clients
    assert done.trained == 5
    task = Task(digits_backbone(), method.adapt)
    before = memory_states(method, task, digits_federation(SIZES))
    kept = [same_bits(store.read(client), before.read(client)) for client in range(5)]
    assert kept == [False, True, True, True, True]  # the first one did not wait for the sum


def test_a_client_with_values_out_of_the_range_is_left_out_by_name() -> None:
    method = lying(FedAvg, 2, 100.0)()
    made = last_round(method, SIZES, rounds=1, secure_aggregation=SECURE)[0]
    assert made.notes == (
        "without client 2: its update has values up to 128: a value is beyond "
        "secure_aggregation.range = 8, and a larger range needs a new run",
    )
    assert made.cohort.clients == (0, 1, 3, 4)
    message = r"4 of 5 clients sent a usable update \(client 2: .* a new run\), 5 are needed$"
    with pytest.raises(InputError, match=message):
        last_round(method, SIZES, rounds=1, secure_aggregation=SecureAggregationConfig(0.9))


@pytest.mark.slow
def test_noise_is_added_to_the_sum() -> None:
    """Clipped by the clients, to equal weights; the server sees no update that it could clip."""
    plan = replace(PRIVATE, secure_aggregation=SECURE)
    assert is_near(server_after(FedAvg(), plan), server_after(FedAvg(), PRIVATE))


def test_under_noise_no_client_is_told_how_many_examples_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told, ask = list[tuple[int, int]](), Simulation.ask

    def heard(clients: Simulation, step: str, setting: Any, messages: Any) -> Any:
        told.extend((one.total, one.count) for one in messages.values() if step == "mask")
        return ask(clients, step, setting, messages)

    monkeypatch.setattr(Simulation, "ask", heard)
    last_round(FedAvg(), SIZES, rounds=1, secure_aggregation=SECURE)
    assert told == 5 * [(sum(SIZES), 5)]
    told.clear()
    server_after(FedAvg(), replace(PRIVATE, rounds=1, secure_aggregation=SECURE))
    assert told
    assert all(total == count for total, count in told)


def test_clients_add_the_noise_and_the_server_none() -> None:
    """The least of five that may be left are three, of whom two add what is needed."""
    quiet, more = PrivacyConfig(noise=0.01, clip=0.01), {"rounds": 1, "secure_aggregation": SECURE}
    loud = PrivacyConfig(noise=1.0, clip=0.01, noise_by="clients")
    plain, made = (server_after(FedAvg(), replace(PRIVATE, privacy=one, **more))
                   for one in (quiet, loud))  # fmt: skip
    added = flat(made).double() - flat(plain).double()
    expected = 0.01 / 5 * np.sqrt(5 / 2 + 0.01**2)
    assert float(added.std()) == pytest.approx(expected, rel=4 / np.sqrt(2 * len(added)))


REFUSED = [
    *("fedhft", "fedmerge", "pfedgate", "flora", "flexlora", "hetlora", "scaffold"),
    *("lora-fair", "fedalt", "ifca", "fedmd", "heterofl", "fedmask"),
]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in ("scaffold", "ifca") else pytest.mark.slow)
        for name in METHODS
    ],
)
def test_a_method_runs_or_is_refused_by_name(name: str) -> None:
    method = METHODS[name]()
    task = Task(digits_backbone(), method.adapt)
    plan = Plan(6, engine=EngineConfig("sequential"), secure_aggregation=SECURE)
    if name in REFUSED:
        with pytest.raises(InputError, match=f"secure_aggregation: {name} as configured needs"):
            check(method, task, digits_federation(SIZES), plan)
        return
    *_, last = rounds(method, task, digits_federation(SIZES), replace(plan, rounds=1))
    assert len(last.cohort.clients) == len(SIZES)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cohort": CohortConfig(above_norm="clip")}, "cohort.above_norm does not go with"),
        ({"cohort": CohortConfig(max_norm=1.0)}, "cohort.max_norm does not go with"),
        ({"cohort": CohortConfig(buffer=2)}, "cohort.buffer does not go with"),
        ({"attack": AttackConfig("scaling")}, "attack.kind does not go with"),
        ({"cohort": CohortConfig(size=1)}, "needs a cohort of two clients or more; it has 1"),
        (
            {"secure_aggregation": SecureAggregationConfig(0.7, neighbours=2)},
            "neighbours = 2: so few don't hide the updates of 5 clients; allowed: 4 or more",
        ),
        ({"privacy": PrivacyConfig(noise=1.0, clip=9.0)}, "range = 8 is less than privacy.clip"),
        (
            {"privacy": PrivacyConfig(noise=1.0, clip=1e-5)},
            "fewer than 10,000 steps of whole numbers in all",
        ),
        (
            {"privacy": PrivacyConfig(noise=0.01, clip=2.5e-4, noise_by="clients")},
            "94.9 steps of whole numbers, and at least 100 are needed; lower secure_aggregation.r",
        ),
        ({}, "robust does not go with"),
    ],
)
def test_settings_that_look_at_single_uploads_are_refused(changes: Any, said: str) -> None:
    method = FedAvg(robust=Robust("median") if not changes else Robust())
    plan = Plan(1, **{"secure_aggregation": SECURE, **changes})
    with pytest.raises(InputError, match=said):
        check_plan(method, FEDERATION, plan, torch.device("cpu"))


def test_settings_without_a_threshold_are_refused() -> None:
    with pytest.raises(InputError, match="secure_aggregation has no threshold"):
        SecureAggregationConfig(range=1.0)
