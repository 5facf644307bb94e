"""Attackers in a run: what they send, what they train on, and who is evaluated."""

from __future__ import annotations

import pytest
import torch

from fedtailor import random
from fedtailor.engine.client import client_round
from fedtailor.engine.config import CohortConfig, EngineConfig, Plan
from fedtailor.engine.prepare import blank_batch, cohort_of, first_server, upload_chain
from fedtailor.errors import InputError
from fedtailor.method import Method
from fedtailor.methods.fedalt import FedALT
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedsdg import FedSDG
from fedtailor.methods.flexlora import FlexLoRA
from fedtailor.methods.flora import FLoRA
from fedtailor.methods.heterofl import HeteroFL
from fedtailor.methods.hetlora import HetLoRA
from fedtailor.methods.ifca import IFCA
from fedtailor.methods.local import Local
from fedtailor.methods.scaffold import Scaffold
from fedtailor.optim import ClientContext
from fedtailor.params import Params, subtract
from fedtailor.task.task import Task
from fedtailor.uploads.attacks import STRENGTHS, AttackConfig
from fedtailor.uploads.collected import UploadStack
from fedtailor.uploads.rules import Robust
from tests.small import digits_backbone, digits_federation, last_round, same_bits

FIVE = (9,) * 5


def test_a_sign_flip_turns_the_mean_update_round() -> None:
    """Four of five send x, the fifth -x, for x the mean of the four: the server moves by 3/5."""
    without = last_round(FedAvg(), FIVE, rounds=1, attack=AttackConfig("free-rider", clients=(2,)))
    flipped = last_round(FedAvg(), FIVE, rounds=1, attack=AttackConfig("sign-flip", clients=(2,)))
    task = Task(digits_backbone(), FedAvg().adapt)
    for name, start in task.state.items():
        if name not in task.buffers:
            moved = without[0].server[name] - start  # 4/5 x
            torch.testing.assert_close(
                flipped[0].server[name] - start, 3 / 4 * moved, rtol=1e-4, atol=1e-6
            )


def two_uploads(method: Method, task: Task, lr_scale: float) -> tuple[Params, UploadStack]:
    """The server's first state, and the uploads of clients 0 and 1 that train on blank examples."""
    federation, uploads = digits_federation(FIVE), UploadStack(2, 1e9)
    server = first_server(method, task, federation)
    for client in (0, 1):
        received, key = method.send(task, server, client), random.key(client)
        private, batches = method.init_client(task, client, key), [blank_batch(federation.dataset)]
        context = ClientContext(key, lr_scale)
        uploads.put(client, client_round(method, task, received, private, batches, context)[0])
    return server, uploads


@pytest.mark.parametrize(
    "method",
    [HeteroFL(widths=(1.0, 0.5)), FlexLoRA(rank=(4, 2)), HetLoRA(rank=(4, 2)), IFCA(), FedALT()],
)
def test_who_learns_nothing_sends_the_upload_that_changes_nothing(method: Method) -> None:
    """Also a client of half the width or rank."""
    task = Task(digits_backbone(), method.adapt)
    server, uploads = two_uploads(method, task, 0.0)
    chain = upload_chain(method, task, digits_federation(FIVE), Plan(rounds=1))
    at = chain.at(server, 1, (0, 1))
    for upload in (uploads.upload(0), uploads.upload(1)):
        unchanged = at.unchanged(upload)
        for name, value in at.updates(upload).items():
            assert value.equal(unchanged[name]), name


@pytest.mark.parametrize("method", [HeteroFL(widths=(1.0, 0.5)), Scaffold(), FLoRA()])
def test_free_riders_alone_change_nothing(method: Method) -> None:
    task = Task(digits_backbone(), method.adapt)
    server, uploads = two_uploads(method, task, 1.0)
    plan = Plan(rounds=1, attack=AttackConfig("free-rider", fraction=1.0))
    chain = upload_chain(method, task, digits_federation(FIVE), plan)
    chain.gather(uploads, chain.at(server, 1, (0, 1)))
    cohort = cohort_of(digits_federation(FIVE), 1, (0, 1))
    after = method.aggregate(task, server, uploads.params, cohort)
    for name in server.keys() - set(task.buffers):
        torch.testing.assert_close(after[name], server[name])


@pytest.mark.slow
def test_labels_are_wrong_for_attackers_alone() -> None:
    attack = AttackConfig("label-flip", clients=(1,), first_round=2)
    honest, bad = (last_round(Local(), FIVE, **kw)[1] for kw in ({}, {"attack": attack}))
    for client in range(5):
        assert same_bits(honest.read(client), bad.read(client)) == (client != 1)


def test_attackers_are_not_evaluated() -> None:
    last, _ = last_round(FedAvg(), FIVE, attack=AttackConfig("mimic", clients=(0, 3)))
    assert {evaluation.clients for evaluation in last.evaluations} == {(1, 2, 4)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", STRENGTHS)
def test_processes_send_what_one_process_sends(kind: str) -> None:
    attack = AttackConfig(kind, fraction=0.4)  # type: ignore[arg-type]
    method = FedSDG(robust=Robust("multi-krum", attackers=1, before=("clip", "nnm")))
    one, two = (
        last_round(method, FIVE, attack=attack, engine=EngineConfig(executor, processes=2))[0]
        for executor in ("auto", "processes")
    )
    assert same_bits(one.server, two.server)
    assert not same_bits(one.server, last_round(method, FIVE)[0].server)


@pytest.mark.slow
@pytest.mark.parametrize("method", [FedAvg(), FedSDG()])
def test_a_rule_holds_what_plain_aggregation_loses(method: Method) -> None:
    """Two of seven send updates a thousand times as long as the others'."""
    attack = AttackConfig("scaling", clients=(2, 5), strength=-1000.0)
    seven = (9,) * 7
    clean = last_round(method, seven)[0].server
    plain = last_round(method, seven, attack=attack)[0].server
    name = type(method)
    robust = name(robust=Robust("multi-krum", attackers=2))
    held = last_round(robust, seven, attack=attack)[0].server

    def off(server: dict[str, torch.Tensor]) -> float:
        return max(float(v.abs().max()) for v in subtract(server, clean).values())

    assert off(held) < 1 < off(plain)


def test_what_does_not_go_together_is_told() -> None:
    with pytest.raises(InputError, match="all evaluated clients attack"):
        last_round(FedAvg(), FIVE, attack=AttackConfig("mimic", fraction=1.0))
    with pytest.raises(InputError, match="clients has 7"):
        last_round(FedAvg(), FIVE, attack=AttackConfig("mimic", clients=(7,)))
    novel = tuple(digits_federation(FIVE).novel(3))
    attack = AttackConfig("mimic", clients=novel[:1])
    with pytest.raises(InputError, match=r"all attackers are among the 3 clients of cohort\.novel"):
        last_round(FedAvg(), FIVE, attack=attack, cohort=CohortConfig(novel=3))
