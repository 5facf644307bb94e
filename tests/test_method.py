"""The interface of methods: cohorts, papers, and the defaults, which make up FedAvg."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from fedtailor.method import Cohort, Method, Paper
from fedtailor.methods import METHODS
from fedtailor.methods.fedavg import FedAvg
from fedtailor.optim import Optimiser
from fedtailor.params import Params
from fedtailor.random import key
from fedtailor.task.task import Task
from tests.golden import X, Y, linear_backbone, one_round, softmax_gradient
from tests.small import last_round, same_bits

W = np.array([[0.1, -0.2], [0.3, 0.4]], dtype=np.float32)
ETA = 0.5


@dataclass(frozen=True)
class Plain(Method):
    """Nothing but the defaults."""

    name: ClassVar[str] = "plain"
    family: ClassVar[str] = "global"
    needs_only_mean: ClassVar[bool] = True


@dataclass(frozen=True)
class PlainMean(Plain):
    """Every client counts once; the server takes the mean as it comes."""

    def client_weights(self, cohort: Cohort) -> Tensor:
        return cohort.uniform


@dataclass(frozen=True)
class PlainMeanOfStack(PlainMean):
    """The same from all uploads at once."""

    needs_only_mean: ClassVar[bool] = False


@dataclass(frozen=True)
class PrivateHead(Plain):
    """Every client keeps its head."""

    def is_private(self, task: Task, name: str) -> bool:
        return task.in_head(name)


def cohort() -> Cohort:
    sizes = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    return Cohort((3, 5, 8), sizes, round=4, key=key(0), num_clients=20)


def stepped(client: int) -> np.ndarray:
    """W after a gradient step of one client, in NumPy."""
    w = W.astype(np.float64)
    return w - ETA * softmax_gradient(w, X[client], Y[client])


# Cohort


def test_shares_follow_the_examples_and_uniform_counts_clients() -> None:
    assert cohort().shares.tolist() == [0.125, 0.25, 0.625]
    assert cohort().uniform.tolist() == pytest.approx([1 / 3] * 3)
    assert cohort().shares.dtype == cohort().uniform.dtype == torch.float64


def test_a_subset_keeps_its_members_examples() -> None:
    part = cohort().subset(torch.tensor([0, 2]))
    assert part.clients == (3, 8)
    assert part.num_examples.tolist() == [1.0, 5.0]
    assert (part.round, part.num_clients) == (4, 20)


def test_a_pooled_cohort_is_one_member_with_all_examples() -> None:
    pooled = cohort().pooled()
    assert pooled.clients == ()
    assert pooled.num_examples.tolist() == [8.0]
    assert pooled.shares.tolist() == pooled.uniform.tolist() == [1.0]
    assert (pooled.round, pooled.num_clients) == (4, 20)


# Paper


@pytest.mark.parametrize("name", sorted(METHODS.keys() - {"local"}))
def test_every_method_cites_its_paper(name: str) -> None:
    paper = METHODS[name].paper()
    assert len(paper.title.split()) >= 3
    assert len(paper.authors.split()) >= 2
    assert str(paper.year) in paper.venue
    assert paper.year is not None
    assert 2015 < paper.year < 2030


def test_methods_of_one_file_share_a_paper() -> None:
    assert METHODS["fedadam"].paper() == METHODS["fedyogi"].paper()
    assert METHODS["fedprox"].paper() == Paper(
        title="Federated Optimization in Heterogeneous Networks",
        authors="T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith",
        venue="MLSys 2020",
        year=2020,
    )


@pytest.mark.parametrize("docstring", ["", "X: a method.", "X.\n\n    w <- w - eta g\n\nNo paper."])
def test_without_a_citation_there_is_no_paper(docstring: str) -> None:
    assert Paper.cited_in(docstring) == Paper()
    assert METHODS["local"].paper() == Paper()


@pytest.mark.parametrize(
    ("venue", "year"), [("arXiv 2003.13461, 2020", 2020), ("AAAI 2026 (arXiv 2503.11880)", 2026)]
)
def test_numbers_of_preprints_are_no_years(venue: str, year: int) -> None:
    paper = Paper.cited_in(f"X.\n\nOn X:\nA Study. A. Author,\nB. Other. {venue}.\n\nMore.")
    assert paper == Paper("On X: A Study", "A. Author, B. Other", venue, year)


# The defaults


@pytest.mark.parametrize(("method", "shares"), [(Plain(), [0.25, 0.75]), (PlainMean(), [0.5, 0.5])])
def test_a_round_is_local_steps_and_their_weighted_mean(
    method: Method, shares: list[float]
) -> None:
    method = replace(method, optimiser=Optimiser("sgd", lr=ETA))
    task = Task(linear_backbone(W), method.adapt)
    server, private = one_round(method, task, task.state, [{}, {}], steps=1)
    assert private == [{}, {}]
    expected = sum(share * stepped(client) for client, share in enumerate(shares))
    np.testing.assert_allclose(server["linear.weight"].numpy(), expected, atol=1e-6)


@pytest.mark.slow
def test_the_defaults_are_fedavg() -> None:
    ours, fedavg = last_round(Plain())[0], last_round(FedAvg())[0]
    assert same_bits(ours.server, fedavg.server)
    assert ours.evaluations == fedavg.evaluations


@pytest.mark.slow
def test_weights_count_alike_in_a_stack_and_in_a_mean() -> None:
    """The engine adds up the uploads of methods that need only their mean, with their weights."""
    mean, stack = last_round(PlainMean())[0].server, last_round(PlainMeanOfStack())[0].server
    assert mean.keys() == stack.keys()
    for name, value in mean.items():
        torch.testing.assert_close(value, stack[name], atol=1e-6, rtol=1e-6)
    by_examples = last_round(Plain())[0].server["hidden.weight"]
    assert not torch.allclose(mean["hidden.weight"], by_examples, atol=1e-4)


def test_a_state_is_split_by_what_is_private() -> None:
    last, store = last_round(PrivateHead())
    assert {name.split(".")[0] for name in last.server} == {"conv", "norm", "hidden"}
    assert {name.split(".")[0] for name in store.read(0)} == {"head"}
    task, method = Task(linear_backbone(W)), Plain()
    assert method.init_client(task, 0, key(0)) == {}
    assert method.init_server(task, 2, key(0)) == task.state


def test_the_global_model_is_the_tasks_part_of_the_servers_state() -> None:
    task, method = Task(linear_backbone(W)), Plain()
    assert method.global_state(task, task.state) is task.state
    more: Params = {**task.state, "server.momentum": torch.zeros(2)}
    shown = method.global_state(task, more)
    assert shown is not None
    assert shown.keys() == task.state.keys()
    assert method.global_state(task, {"server.momentum": torch.zeros(2)}) is None
