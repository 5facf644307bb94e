"""The bound on norms in the loop: who is left out or clipped, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedtailor.data.config import LocalConfig
from fedtailor.data.federation import Federation
from fedtailor.engine.config import CohortConfig, EngineConfig, Plan
from fedtailor.engine.prepare import memory_states
from fedtailor.engine.results import Round
from fedtailor.engine.rounds import rounds
from fedtailor.errors import DivergedError, InputError
from fedtailor.method import Method
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedbn import FedBN
from fedtailor.methods.fedopt import FedAdagrad, FedAdam, FedYogi
from fedtailor.methods.ifca import IFCA
from fedtailor.optim import ClientContext
from fedtailor.params import Batch, Params, clone, flat, subtract
from fedtailor.store.lines import history_line
from fedtailor.task.task import Task
from fedtailor.uploads.attacks import AttackConfig
from fedtailor.uploads.rules import Robust
from tests.small import digits_backbone, digits_federation, same_bits

FEDERATION = digits_federation()
PLAN = Plan(rounds=2, local=LocalConfig(batch_size=8), cohort=CohortConfig())


def lying(kind: type[Method], client: int, value: float) -> type[Method]:
    """A method of which one client sends one value that is far too large."""

    @dataclass(frozen=True)
    class Lying(kind):  # type: ignore[misc, valid-type]
        def send(self, task: Task, server: Params, receiver: int) -> Params:
            lies = torch.tensor(float(receiver == client))
            return {**super().send(task, server, receiver), "lies": lies}

        def local(
            self, task: Task, state: Params, batches: Sequence[Batch], context: ClientContext
        ) -> tuple[Params, Tensor]:
            state = dict(state)
            lies = state.pop("lies")
            trained, loss = super().local(task, state, batches, context)
            bias = trained["head.bias"]
            trained["head.bias"] = torch.where(lies > 0, torch.full_like(bias, value), bias)
            return trained, loss

    return Lying


def run(
    method: Method, plan: Plan = PLAN, federation: Federation = FEDERATION, **options: Any
) -> list[Round]:
    task = Task(digits_backbone(), method.adapt)
    return list(rounds(method, task, federation, plan, **options))


def with_cohort(plan: Plan = PLAN, **settings: Any) -> Plan:
    return replace(plan, cohort=replace(plan.cohort, **settings))


@pytest.mark.parametrize(
    "robust", [Robust(), pytest.param(Robust("multi-krum", keep=4), marks=pytest.mark.slow)]
)
def test_an_upload_far_above_the_others_is_left_out(robust: Robust) -> None:
    """Also of a mean that is taken as uploads come, and whatever on_divergence says. The round has
    the bits of one that goes on without a client whose upload is not finite."""
    done = run(lying(FedAvg, 2, 1e20)(robust=robust))
    assert [one.cohort.clients for one in done] == [(0, 1, 3, 4)] * 2
    assert [len(one.norms) for one in done] == [4, 4]
    (note,) = done[0].notes
    assert note.startswith("without client 2: the norm of its upload, 3.16e+20, is above")
    assert done[0].costs is not None
    assert done[0].bytes_up == 5 * sum(done[0].costs.up.values())
    assert history_line(done[0], {})["trained"] == 5  # by whom a table divides these bytes
    skip = replace(PLAN, engine=EngineConfig(on_divergence="skip"))
    without = run(lying(FedAvg, 2, torch.nan)(robust=robust), skip)
    assert same_bits(done[-1].server, without[-1].server)
    assert (without[0].trained, without[0].bytes_up) == (5, done[0].bytes_up * 4 // 5)


def test_without_a_bound_a_divergence_names_it_among_the_ways_out() -> None:
    for above, way_out in (("keep", r"optimiser\.clip, or bound .* \(cohort\.above_norm\)$"),
                           ("refuse", r"optimiser\.clip$")):  # fmt: skip
        with pytest.raises(DivergedError, match=way_out):
            run(lying(FedAvg, 2, torch.nan)(), with_cohort(above_norm=above))


def test_of_two_clients_a_tiny_upload_does_not_shut_out_the_other() -> None:
    attack = AttackConfig("scaling", clients=(1,), strength=1e-4)
    plan = replace(with_cohort(size=2), rounds=3, attack=attack)
    done = run(FedBN(), plan, federation=digits_federation((23, 3)))
    assert [one.cohort.clients for one in done] == [(0, 1)] * 3


def test_of_two_clients_an_upload_far_above_earlier_ones_is_left_out() -> None:
    attack = AttackConfig("scaling", clients=(1,), strength=1e6, first_round=2, last_round=2)
    plan = replace(with_cohort(size=2), rounds=3, attack=attack)
    done = run(FedAvg(), plan, federation=digits_federation((23, 3)))
    assert [one.cohort.clients for one in done] == [(0, 1), (0,), (0, 1)]
    assert "without client 1: the norm of its upload" in done[1].notes[0]


@pytest.mark.parametrize("sizes", [(23, 3), (23,)])
def test_a_first_round_of_one_or_two_has_the_bound_of_the_servers_state(
    sizes: tuple[int, ...],
) -> None:
    plan, federation = with_cohort(size=len(sizes)), digits_federation(sizes)
    method = lying(FedAvg, len(sizes) - 1, 1e17)()
    if len(sizes) == 2:
        done = run(method, plan, federation=federation)
        assert [one.cohort.clients for one in done] == [(0,)] * 2
    else:
        with pytest.raises(DivergedError, match="norms of 1 of 1 uploads are above"):
            run(method, plan, federation=federation)
    honest = run(FedAvg(), plan, federation=federation)
    assert [len(one.cohort.clients) for one in honest] == [len(sizes)] * 2


@pytest.mark.slow
def test_honest_runs_keep_their_bits() -> None:
    for method in (FedAvg(), IFCA(clusters=2)):
        with_bound, without = run(method), run(method, with_cohort(above_norm="keep"))
        assert same_bits(with_bound[-1].server, without[-1].server)
        assert all(0 < norm < 100 for norm in with_bound[-1].norms)
        assert without[-1].norms == ()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [FedAdagrad, FedAdam, FedYogi])
def test_adaptive_servers_are_not_frozen_by_a_second_moment(kind: type[Method]) -> None:
    """1e18 squared is finite in float32, and v would stay huge; 1e30 squared is not."""
    for value in (1e18, 1e30):
        done = run(lying(kind, 2, value)())
        assert done[-1].cohort.clients == (0, 1, 3, 4)
        moments = [v for name, v in done[-1].server.items() if name.startswith("server.v.")]
        assert max(float(v.max()) for v in moments) < 1
    unbounded = replace(with_cohort(above_norm="keep"), engine=EngineConfig(on_divergence="skip"))
    last = run(lying(kind, 2, 1e30)(), unbounded)[-1]
    assert last.cohort.clients == (0, 1, 3, 4)
    assert "server.v.head.bias of the server's next state is not finite" in last.notes[0]


def test_a_client_left_out_keeps_the_private_state_that_it_had() -> None:
    method = lying(FedBN, 2, 1e20)()
    store = memory_states(method, Task(digits_backbone(), method.adapt), FEDERATION)
    before = {client: clone(store.read(client)) for client in (1, 2)}
    run(method, store=store)
    assert same_bits(store.read(2), before[2])
    assert not same_bits(store.read(1), before[1])


def test_clipped_uploads_are_as_long_as_the_bound() -> None:
    one = replace(with_cohort(size=1), rounds=1)
    (free,) = run(FedAvg(), one)
    (clipped,) = run(FedAvg(), with_cohort(one, above_norm="clip", max_norm=0.01))
    assert clipped.norms == free.norms  # of what was sent
    before = Task(digits_backbone(), FedAvg().adapt).state
    a, b = (flat(subtract(done.server, before)).double() for done in (free, clipped))
    assert b.norm().item() == pytest.approx(0.01, rel=1e-3)
    assert torch.cosine_similarity(a, b, dim=0).item() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("above", ["refuse", "clip"])
def test_attacks_meet_the_bound(above: str) -> None:
    """A scaled update counts as long as it is sent."""
    attack = AttackConfig("scaling", clients=(1,), strength=1e5)
    done = run(FedAvg(), replace(with_cohort(above_norm=above), attack=attack))
    assert (1 in done[-1].cohort.clients) == (above == "clip")
    assert flat(done[-1].server).norm() < 100


def test_a_bound_that_most_uploads_exceed_ends_the_method() -> None:
    with pytest.raises(DivergedError, match=r"norms of 5 of 5 uploads are above 1e-09 .*max_norm"):
        run(FedAvg(), with_cohort(max_norm=1e-9))


def test_clipping_needs_uploads_that_compare_with_the_server() -> None:
    with pytest.raises(InputError, match=r"above_norm = 'clip' .* ifca .* 'refuse'"):
        run(IFCA(), with_cohort(above_norm="clip"))
