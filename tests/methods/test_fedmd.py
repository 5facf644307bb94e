"""FedMD by hand: revisit, consensus, digest and revisit again, in NumPy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedtailor.engine.checks import check
from fedtailor.engine.client import client_round
from fedtailor.engine.config import CohortConfig, Plan
from fedtailor.engine.rounds import rounds
from fedtailor.errors import InputError
from fedtailor.method import Cohort
from fedtailor.methods.fedmd import FedMD
from fedtailor.methods.local import Local
from fedtailor.objectives import CausalLM
from fedtailor.optim import ClientContext, Optimiser, train
from fedtailor.params import Batch, Params, stack
from fedtailor.random import key
from fedtailor.task.task import Task
from tests.golden import SIZES, X, Y, batch_of, linear_backbone, softmax, softmax_gradient
from tests.small import check_all, digits_backbone, digits_federation, last_round, same_bits

F64 = NDArray[np.float64]
W = np.array([[0.1, -0.2], [0.3, 0.4]], dtype=np.float32)
ETA = 0.2
PUBLIC = np.array([[1.0, 0.0], [0.5, 2.0], [-1.0, 1.0], [3.0, -1.0]])
EVERYBODY: Batch = {"x": torch.tensor(PUBLIC).float(), "labels": torch.tensor([0, 1, 1, 0])}


def public_round(
    method: FedMD, task: Task, server: Params, private: list[Params], number: int
) -> tuple[Params, list[Params], Params]:
    """A round of both clients: the new server state, the private states, the uploads."""
    uploads, kept = [], []
    for client in (0, 1):
        context = ClientContext(key(client), round=number, public=EVERYBODY)
        upload, own, _ = client_round(
            method, task, server, private[client], [batch_of(client)] * 2, context
        )
        uploads.append(upload)
        kept.append(own)
    cohort = Cohort((0, 1), SIZES, number, key(9, number))
    return method.aggregate(task, server, stack(uploads), cohort), kept, stack(uploads)


def started(**fields: Any) -> tuple[FedMD, Task, Params, list[Params]]:
    method = FedMD(optimiser=Optimiser("sgd", lr=ETA), **fields)
    task = Task(linear_backbone(W), method.adapt)
    private = [method.init_client(task, client, key(client)) for client in (0, 1)]
    return method, task, method.init_server(task, 2, key(5)), private


def revisited(w: F64, client: int) -> F64:
    for _ in range(2):
        w = w - ETA * softmax_gradient(w, X[client], Y[client])
    return w


def pull(z: F64, target: F64, loss: str) -> F64:
    """d(digest's loss) / dz."""
    if loss == "l1":
        return np.sign(z - target) / z.size
    if loss == "mse":
        return 2 * (z - target) / z.size
    return (softmax(z) - softmax(target)) / len(z)


@pytest.mark.parametrize("digest_loss", ["l1", "mse", "kl"])
def test_two_rounds_follow_algorithm_1(digest_loss: Any) -> None:
    method, task, server, private = started(digest_loss=digest_loss, digest_epochs=2)
    first, kept, sent = public_round(method, task, server, private, 1)
    w = [revisited(W.astype(np.float64), client) for client in (0, 1)]  # nothing to digest yet
    everything = sent["scores"].double().numpy()  # all public examples, in the drawn order
    order = [int(np.abs(PUBLIC @ w[0].T - z).sum(1).argmin()) for z in everything[0]]
    assert sorted(order) == [0, 1, 2, 3]
    x = PUBLIC[order]
    for client in (0, 1):
        np.testing.assert_allclose(kept[client]["linear.weight"], w[client], atol=1e-6)
        np.testing.assert_allclose(everything[client], x @ w[client].T, atol=1e-5)
    consensus = (x @ w[0].T + x @ w[1].T) / 2
    np.testing.assert_allclose(first["public.consensus"], consensus, atol=1e-5)
    _, kept, _ = public_round(method, task, first, kept, 2)
    for client in (0, 1):
        v = w[client]
        for _ in range(2):
            v = v - ETA * pull(x @ v.T, consensus, digest_loss).T @ x
        v = revisited(v, client)
        np.testing.assert_allclose(kept[client]["linear.weight"], v, atol=1e-5)


def test_every_round_scores_other_examples_and_digests_those_scored_before() -> None:
    method, task, server, private = started(public_examples=2)
    seen = []
    for number in range(1, 9):
        new, private, sent = public_round(method, task, server, private, number)
        assert sent["scores"].shape == (2, 2, 2)
        assert new["public.drawn"].equal(server["public.next"])
        scores = PUBLIC @ private[0]["linear.weight"].double().numpy().T
        at = [int(np.abs(scores - z.numpy()).sum(1).argmin()) for z in sent["scores"][0]]
        assert len(set(at)) == 2
        seen.append(tuple(at))
        server = new
    assert len(set(seen)) > 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [{}, {"layers": ("h*", "norm")}, {"trainable": "lora", "rank": 2, "lora_alpha": 3.0}]
)
def test_the_first_round_is_training_alone(fields: dict[str, Any]) -> None:
    _, ours = last_round(FedMD(**fields), (9, 3), rounds=1)
    _, theirs = last_round(Local(**fields), (9, 3), rounds=1)
    assert all(same_bits(ours.read(client), theirs.read(client)) for client in (0, 1))
    _, ours = last_round(FedMD(**fields), (9, 3), rounds=2)
    _, theirs = last_round(Local(**fields), (9, 3), rounds=2)
    assert not same_bits(ours.read(0), theirs.read(0))


def test_pretraining_takes_the_public_labels_in_the_first_round_alone() -> None:
    method, task, server, private = started(pretrain=3)
    plain = started()[0]
    w = W.astype(np.float64)
    labels = EVERYBODY["labels"].numpy()
    for _ in range(3):
        w = w - ETA * softmax_gradient(w, PUBLIC, labels)
    w = revisited(w, 1)
    _, kept, _ = public_round(method, task, server, private, 1)
    np.testing.assert_allclose(kept[1]["linear.weight"], w, atol=1e-6)
    later, other = (public_round(chosen, task, server, private, 2)[1] for chosen in (method, plain))
    assert same_bits(later[1], other[1])


@pytest.mark.slow
def test_scores_and_digest_go_by_slices() -> None:
    states = {}
    for size in (3, 40):
        last, store = last_round(FedMD(public_batch=size), (9, 3), rounds=1)
        states[size] = (last.server["public.consensus"], store.read(0))
    torch.testing.assert_close(states[3][0], states[40][0])
    assert same_bits(states[3][1], states[40][1])
    digested = [
        last_round(FedMD(public_batch=size), (9, 3), rounds=2)[1].read(0) for size in (3, 40)
    ]
    assert not same_bits(*digested)


def test_the_digest_is_a_training_step_with_dropout_and_batch_statistics() -> None:
    method = FedMD()
    task = Task(digits_backbone(), method.adapt)
    public = digits_federation().public
    assert public is not None
    batch = public.batch(np.arange(8))
    server = {
        **method.init_server(task, 2, key(0)),
        "public.consensus": task.logits(task.state, batch)[:1].expand(8, 10),
    }
    empty = {**batch, "weight": torch.zeros(8)}  # the revisit does nothing
    for number, equal in ((0, True), (1, False)):
        a, b = (
            method.local(
                task, {**task.state, **server}, [empty], ClientContext(key(n), public=batch)
            )[0]
            for n in (0, number)
        )
        assert same_bits(a, b) == equal
        assert not a["norm.running_mean"].equal(task.state["norm.running_mean"])
    frozen = Optimiser("sgd", lr=0.01)
    same, _ = train(task, task.state, [empty], ClientContext(key(0)), frozen)
    assert same_bits(same, task.state)


def test_scores_alone_travel() -> None:
    last, _ = last_round(FedMD(public_examples=7), (9, 3), rounds=2)
    assert last.server["public.consensus"].shape == (7, 10)
    assert last.costs.up.keys() == {"float32", "header"}
    assert last.costs.communicated == 70
    assert {e.model for e in last.evaluations} == {"personal"}


def test_public_test_rows_are_left_alone() -> None:
    federation = digits_federation((9, 3))
    assert federation.public is not None
    cut = replace(federation, public=replace(federation.public, num_train=15))
    last = next(rounds(FedMD(), Task(digits_backbone(), FedMD().adapt), cut, Plan(1)))
    assert last.server["public.consensus"].shape == (15, 10)


def test_what_does_not_fit_is_refused() -> None:
    task = Task(digits_backbone(), FedMD().adapt)
    check_all(FedMD(pretrain=1), task, 5, 5, 3)
    with pytest.raises(InputError, match=r"pretrain = 1 .* 4 of 5 clients .* allowed: 0, or all"):
        check_all(FedMD(pretrain=1), task, 5, 4, 3)
    language = Task(replace(digits_backbone(), objective=CausalLM()), FedMD().adapt)
    with pytest.raises(InputError, match="which the task 'causal-lm' does not"):
        check_all(FedMD(), language, 5, 5, 3)
    without = replace(digits_federation((9, 3)), public=None)
    with pytest.raises(InputError, match="fedmd needs public examples"):
        next(rounds(FedMD(), task, without, Plan(1, cohort=CohortConfig())))


def test_pretraining_needs_the_clients_own_classes() -> None:
    task, federation = Task(digits_backbone(), FedMD().adapt), digits_federation((9, 3))
    public = federation.public
    assert public is not None
    check(FedMD(pretrain=1), task, federation, Plan(1))
    others = replace(public, classes=[f"c{i}" for i in range(12)])
    for wrong, there in ((others, "c0, c1, c2, c3, c4, ... 12 in all"),
                         (replace(public, labels=None), "none")):  # fmt: skip
        far = replace(federation, public=wrong)
        check(FedMD(), task, far, Plan(1))
        with pytest.raises(InputError, match=rf"classes \({there}\) must be the clients' \(0, 1,"):
            check(FedMD(pretrain=1), task, far, Plan(1))
