"""FedHFT's clusters: when they are formed, from what, and what they are good for."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedtailor import random
from fedtailor.data.config import LocalConfig
from fedtailor.data.federation import Federation
from fedtailor.data.table import Partition, Shares
from fedtailor.engine.config import CohortConfig, EngineConfig, EvaluateConfig, Plan
from fedtailor.engine.rounds import rounds
from fedtailor.errors import InputError
from fedtailor.method import Cohort, Server
from fedtailor.methods.fedhft import FedHFT
from fedtailor.optim import Optimiser
from fedtailor.params import Params
from fedtailor.random import key
from fedtailor.task.task import Task
from fedtailor.uploads.rules import Robust
from tests.golden import linear_backbone
from tests.small import check_all, digits, digits_backbone

W0 = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)


def grouped_uploads(scale: float) -> Params:
    """Updates of six clients in two groups, for the network of `linear_backbone`."""
    B = torch.zeros(6, 4, 2)
    B[:3, 0, 0], B[3:, 1, 1] = scale, scale
    noise = 0.05 * scale * random.normal(key("noise"), (6, 4, 2))
    A = random.normal(key("A"), (2, 5)).expand(6, 2, 5).contiguous()
    return {"linear.A": A, "linear.B": B + noise, "linear.kept": torch.ones(6, 4, dtype=torch.bool)}


def test_clustering_begins_after_the_warm_up_and_leaves_absent_clients_alone() -> None:
    method = FedHFT(clusters=2, rank=2, warmup_rounds=3)
    task = Task(linear_backbone(W0), method.adapt)
    server = method.init_server(task, 8, key(0))
    members = (0, 1, 2, 5, 6, 7)
    sizes = torch.tensor([3.0] * 6, dtype=torch.float64)

    def after(number: int) -> Server:
        at = Cohort(members, sizes, number, key(number))
        return method.aggregate(task, server, grouped_uploads(1.0), at)

    assert after(3)["assignments"].equal(server["assignments"])
    product = after(3)["linear.B"] @ after(3)["linear.A"]
    torch.testing.assert_close(product[0], product[1])
    new = after(4)
    p = new["assignments"]
    assert p[[3, 4]].equal(torch.full((2, 2), 0.5))
    assert p[[0, 1, 2]].argmax(1).unique().tolist() != p[[5, 6, 7]].argmax(1).unique().tolist()
    assert p[list(members)].max(1).values.min() > 0.99
    product = new["linear.B"] @ new["linear.A"]  # this round's updates go to the new clusters
    assert (product[0] - product[1]).norm() > 0.5 * product[0].norm()


def test_total_updates_keep_the_groups_apart_when_the_rounds_own_do_not() -> None:
    found = {}
    for updates in ("total", "round"):
        method = FedHFT(clusters=2, rank=2, warmup_rounds=0, updates=updates)  # type: ignore[arg-type]
        task = Task(linear_backbone(W0), method.adapt)
        server = method.init_server(task, 6, key(0))
        everybody, sizes = tuple(range(6)), torch.ones(6, dtype=torch.float64)
        early = Cohort(everybody, sizes, 1, key(1))
        server = method.aggregate(task, server, grouped_uploads(1.0), early)
        noise = {**grouped_uploads(0.0), "linear.B": 0.1 * random.normal(key("late"), (6, 4, 2))}
        last = server["assignments"].argmax(1)
        assert last.tolist() in ([0, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0])
        late = method.aggregate(task, server, noise, Cohort(everybody, sizes, 2, key(2)))
        found[updates] = late["assignments"].argmax(1).equal(last)
    assert found == {"total": True, "round": False}


def conflicting_federation() -> Federation:
    """Digits 0 to 4; in the second group of clients the labels stand for one another."""
    data = digits()
    assert data.labels is not None
    rng = np.random.default_rng(0)
    rows = rng.permutation(np.flatnonzero(data.labels < 5))[:480]
    parts = np.split(rows, 8)  # 60 examples a client
    labels = data.labels.copy()
    for part in parts[4:]:
        labels[part] = (labels[part] + 1) % 5
    cut = {"train": (0, 32), "validation": (32, 40), "test": (40, 60)}
    shares = {name: Shares.of([part[a:b] for part in parts]) for name, (a, b) in cut.items()}
    return Federation(replace(data, labels=labels), Partition(**shares, digest="test"))


@pytest.mark.slow
def test_two_clusters_beat_one_where_two_groups_of_clients_disagree() -> None:
    federation = conflicting_federation()
    plan = Plan(
        rounds=12, local=LocalConfig(batch_size=8, epochs=2), cohort=CohortConfig(),
        engine=EngineConfig("vectorised", 8), evaluate=EvaluateConfig(every=12),
    )  # fmt: skip
    accuracy = {}
    for clusters in (1, 2):
        method = FedHFT(
            clusters=clusters, rank=4, mask_ratio=0.25, warmup_rounds=2,
            optimiser=Optimiser("adam", lr=1e-2, clip=1.0),
        )  # fmt: skip
        task = Task(digits_backbone(dropout=0.0), method.adapt)
        *_, last = rounds(method, task, federation, plan)
        found = {(e.model, e.split): e for e in last.evaluations}
        scores = found["personal", "test"].accuracy
        accuracy[clusters] = float(np.mean([score for score in scores if score is not None]))
    labels = last.server["assignments"].argmax(1).tolist()
    assert labels in ([0] * 4 + [1] * 4, [1] * 4 + [0] * 4)
    assert accuracy[2] > accuracy[1] + 0.2


def test_more_clusters_than_clients_in_the_warm_up_are_refused() -> None:
    federation = conflicting_federation()
    method = FedHFT(clusters=4)
    task = Task(digits_backbone(), method.adapt)
    plan = Plan(rounds=9, cohort=CohortConfig(size=3))
    with pytest.raises(InputError, match=r"clusters is 4, more than the 3 clients .* warm-up"):
        next(rounds(method, task, federation, plan))
    check_all(method, task, num_clients=8, cohort_size=4, rounds=9)


def test_clusters_count_the_clients_that_a_robust_rule_lets_through() -> None:
    krum = Robust("multi-krum", keep=2)
    task = Task(linear_backbone(W0), FedHFT(rank=2).adapt)
    with pytest.raises(InputError, match=r"clusters is 3, more than the 2 clients"):
        check_all(FedHFT(clusters=3, rank=2, robust=krum), task, 8, 8, 9)
    check_all(FedHFT(clusters=2, rank=2, robust=krum), task, 8, 8, 9)


def test_a_warm_up_that_never_ends_is_refused() -> None:
    task = Task(linear_backbone(W0), FedHFT(rank=2).adapt)
    with pytest.raises(InputError, match=r"warmup_rounds is 5 and rounds is 5: .* 0 to 4"):
        check_all(FedHFT(rank=2), task, 8, 8, rounds=5)
    check_all(FedHFT(rank=2), task, 8, 8, rounds=6)
    check_all(FedHFT(rank=2, clusters=1), task, 8, 8, rounds=5)


def test_components_and_reg_covar_reach_the_clustering() -> None:
    options = {"default": {}, "fewer": {"components": 1}, "softer": {"reg_covar": 10.0}}
    certainty = {}
    for name, fields in options.items():
        method = FedHFT(clusters=3, rank=2, warmup_rounds=0, **fields)  # type: ignore[arg-type]
        task = Task(linear_backbone(W0), method.adapt)
        uploads = grouped_uploads(1.0)
        uploads["linear.B"] += 0.5 * random.normal(key("scatter"), (6, 4, 2))
        at = Cohort(tuple(range(6)), torch.ones(6, dtype=torch.float64), 1, key(1))
        server = method.init_server(task, 6, key(0))
        p = method.aggregate(task, server, uploads, at)["assignments"]
        certainty[name] = p.max(1).values.mean().item()
    assert certainty["default"] > 0.99
    assert certainty["fewer"] < certainty["default"] - 1e-5
    assert certainty["softer"] < certainty["default"] - 0.05
