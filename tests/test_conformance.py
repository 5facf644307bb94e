"""What every method must satisfy, on ragged clients, with no list of exceptions.

A new method needs no change here: it is in METHODS. The checks are those of `fedtailor.testing`. A
small network with everything that can go wrong and a transformer run them, on real examples. The
fast part has every method on the network.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedtailor.method import Method
from fedtailor.methods import METHODS
from fedtailor.methods.apfl import APFL
from fedtailor.methods.ditto import Ditto
from fedtailor.methods.fedala import FedALA
from fedtailor.methods.fedalt import FedALT
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedbabu import FedBABU
from fedtailor.methods.feddpa import FedDPA
from fedtailor.methods.fedem import FedEM
from fedtailor.methods.fedhft import FedHFT
from fedtailor.methods.fedmask import FedMask
from fedtailor.methods.fedmd import FedMD
from fedtailor.methods.fedmerge import FedMerge
from fedtailor.methods.fedper import FedPer
from fedtailor.methods.fedsa_lora import FedSALoRA
from fedtailor.methods.fedsdg import FedSDG
from fedtailor.methods.fedsq import FedSQ
from fedtailor.methods.flexlora import FlexLoRA
from fedtailor.methods.flora import FLoRA
from fedtailor.methods.heterofl import HeteroFL
from fedtailor.methods.hetlora import HetLoRA
from fedtailor.methods.ifca import IFCA
from fedtailor.methods.per_fedavg import PerFedAvg
from fedtailor.methods.pfedgate import PFedGate
from fedtailor.methods.pfedmoe import PFedMoE
from fedtailor.methods.scaffold import Scaffold
from fedtailor.objectives import OBJECTIVES
from fedtailor.optim import Optimiser
from fedtailor.params import ALIGNMENT
from fedtailor.task.task import Task
from fedtailor.testing import Case, Subject, checks
from fedtailor.testing.check import refusal
from fedtailor.testing.subjects import EQUAL, plan_of
from tests import kinds
from tests.small import digits_backbone, digits_federation
from tests.text import tiny_bert, topics_federation

_FEW = (9, 3, 12, 1, 7)  # training examples of a client


@functools.cache
def subject_of(on: str) -> Subject:
    if on in OBJECTIVES:
        few, equal = (kinds.federation(on, sizes) for sizes in (_FEW, EQUAL))
        return Subject(on, kinds.backbone(on), few, plan_of(2), kinds.backbone(on), equal, 1.0)
    if on == "digits":
        return Subject(
            on, digits_backbone(), digits_federation(), plan_of(3),
            digits_backbone(dropout=0.0), digits_federation(EQUAL), 0.95,
        )  # fmt: skip
    federations = topics_federation(), topics_federation(EQUAL)
    return Subject(on, tiny_bert(), federations[0], plan_of(2), tiny_bert(), federations[1], 0.97)


VARIANTS: dict[str, Method] = {
    "fedavg, LoRA": FedAvg(trainable="lora", optimiser=Optimiser("adam", lr=1e-3)),
    "fedavg, head": FedAvg(trainable="head"),
    "fedhft": FedHFT(warmup_rounds=1),  # by default it clusters after more rounds than are run
    "fedhft, clusters and mixed budgets": FedHFT(
        clusters=2, warmup_rounds=1, rank=(2, 4), mask_ratio=(0.0, 0.5, 0.9)
    ),
    "fedhft, own starts": FedHFT(
        rank=4,  # where this or clusters is another number, rounding can decide what is kept
        clusters=2,
        warmup_rounds=0,
        start="own",
        updates="round",
        exact_svd=True,
        finetune_passes=1,
    ),
    "fedsdg, factor form": FedSDG(form="factor", private_init="zero"),
    "fedsdg, private head": FedSDG(private_head=True, aggregation="leave-one-out"),
    "fedsdg, fixed gate": FedSDG(gate=1.0),
    "pfedgate, mixed budgets": PFedGate(
        sparsity=(0.5, 0.2),
        evaluation="client",
        straight_through="dense",
        optimiser=Optimiser("sgd", lr=0.05, momentum=0.5, weight_decay=0.01),
    ),
    "pfedgate, by client": PFedGate(adaptation="client", evaluation="client", solver="greedy"),
    "fedsq, masks": FedSQ(smooth="mask", max_pool="structural", cache="masks"),
    "fedmerge, LoRA": FedMerge(models=3, trainable="lora", normalise_rows=True, inner="all"),
    "ditto, LoRA": Ditto(trainable="lora", private_passes=2),
    "apfl, fixed": APFL(adaptive=False, optimiser=Optimiser("adam", lr=1e-3, eps=1e-3)),
    "per-fedavg, exact": PerFedAvg(form="exact", trainable="lora", lr_inner=0.1),
    "fedmask, without pruning": FedMask(sparsity=0.0, consensus=1.0),
    "heterofl, all narrow": HeteroFL(widths=(0.5, 0.2), weights="examples", scaler=False),
    "fedmerge, fixed": FedMerge(models=3, weights="fixed", selected=1, normalise=False),
    "fedsa-lora, private head": FedSALoRA(private_head=True),
    "flora, ranks by client": FLoRA(rank=(2, 8, 5)),
    "flexlora, ranks by client": FlexLoRA(rank=(2, 8, 5)),
    "hetlora, ranks by client": HetLoRA(rank=(2, 8, 5), gamma=0.5, lam=1.0),
    "scaffold, option I": Scaffold(variates="gradient", optimiser=Optimiser(momentum=0.5)),
    "fedalt, fixed": FedALT(mixing="fixed", weight=0.7),
    "feddpa, F": FedDPA(form="F", weighting="fixed"),
    "fedper, private LoRA": FedPer(private=("*.lora_B",), trainable="lora"),
    "fedbabu, LoRA": FedBABU(trainable="lora", finetune_part="all", finetune_passes=1),
    "fedala, LoRA": FedALA(trainable="lora", mixed_layers=2),
    "fedem, LoRA": FedEM(components=2, trainable="lora"),
    "fedmd, slices": FedMD(public_examples=20, public_batch=6, digest_loss="kl", digest_epochs=2),
    "ifca, gradients of LoRA": IFCA(clusters=4, averaging="gradients", trainable="lora"),
    "pfedmoe, LoRA": PFedMoE(trainable="lora", lr_gate=0.1),
}
CASES = {**{name: method() for name, method in METHODS.items()}, **VARIANTS}


FAMILIES = ("local", "fedavg", "fedper", "ditto", "fedsdg", "fedmerge", "fedhft", "pfedgate")


def on_both(
    names: Collection[str],
    fast: Collection[str] = METHODS,
) -> pytest.MarkDecorator:
    """A test of these cases on either model. On the digits the ``fast`` ones are in the fast part,
    others in the slow one; on texts ``fast`` methods are in the slow part, all others in the long
    one."""
    pairs = [
        pytest.param(name, on, id=f"{name}-{on}", marks=_marks(on, name in fast, name in METHODS))
        for on in ("digits", "text")
        for name in names
    ]  # fmt: skip
    return pytest.mark.parametrize(("name", "on"), pairs)


def _marks(on: str, is_fast: bool, is_method: bool) -> Sequence[pytest.MarkDecorator]:
    if on == "digits":
        return [] if is_fast else [pytest.mark.slow]
    return [pytest.mark.slow if is_fast and is_method else pytest.mark.long]


every_case = on_both(CASES)
every_method = on_both(METHODS)


Cases = Callable[[str, str], Case]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    """A method on a model: several tests look at its one undisturbed run; none changes it."""
    folder = tmp_path_factory.mktemp("runs")

    def case(name: str, on: str) -> Case:
        method: Any = CASES[name]
        if on in OBJECTIVES and hasattr(method, "optimiser"):
            # some models' outputs have a bias whose gradient is 0, up to rounding
            method = replace(method, optimiser=replace(method.optimiser, eps=1e-3))
        return Case(method, subject_of(on), folder / f"{name} on {on}")

    return functools.cache(case)


@every_case
def test_sequential_equals_vectorised(name: str, on: str, cases: Cases) -> None:
    checks.runs(cases(name, on))
    checks.sequential_equals_vectorised(cases(name, on))


@every_case
def test_padding_is_invisible(name: str, on: str, cases: Cases) -> None:
    checks.padding_is_invisible(cases(name, on))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_memory_may_be_saved(name: str, cases: Cases) -> None:
    checks.parts_of_batches_add_up(cases(name, "text"))
    checks.checkpointing_changes_nothing(cases(name, "text"))


@every_case
def test_nothing_private_is_sent(name: str, on: str, cases: Cases) -> None:
    checks.nothing_private_is_sent(cases(name, on))


@every_case
def test_what_travels_packed_arrives_whole(name: str, on: str, cases: Cases) -> None:
    checks.packed_uploads_arrive_whole(cases(name, on))


@on_both([name for name in CASES if type(CASES[name]).check_upload is not Method.check_upload])
def test_honest_uploads_are_accepted(name: str, on: str, cases: Cases) -> None:
    checks.honest_uploads_are_accepted(cases(name, on))


@every_case
def test_what_is_sent_keeps_its_form(name: str, on: str, cases: Cases) -> None:
    checks.what_is_sent_keeps_its_form(cases(name, on))


@on_both([name for name in METHODS if METHODS[name].needs_only_mean])
def test_who_averages_needs_no_more_than_the_mean(name: str, on: str, cases: Cases) -> None:
    checks.the_mean_is_enough(cases(name, on))


@every_method
def test_the_server_holds_nothing_private(name: str, on: str, cases: Cases) -> None:
    checks.the_server_holds_nothing_private(cases(name, on))


@every_case
def test_the_servers_tensors_are_contiguous_and_aligned(name: str, on: str, cases: Cases) -> None:
    """As other processes and resumed runs get them: kernels round differently otherwise."""
    for key, value in cases(name, on).whole.last.server.items():
        assert value.is_contiguous(), key
        assert value.numel() == 0 or value.data_ptr() % ALIGNMENT == 0, key


@on_both(METHODS, fast=FAMILIES)
def test_a_resumed_run_ends_with_the_same_bytes(name: str, on: str, cases: Cases) -> None:
    checks.resumes_exactly(cases(name, on))


@every_method
def test_another_seed_gives_other_numbers(name: str, on: str, cases: Cases) -> None:
    checks.another_seed_gives_other_numbers(cases(name, on))


@on_both(METHODS, fast=FAMILIES)
def test_training_lowers_the_loss(name: str, on: str, cases: Cases) -> None:
    checks.training_lowers_the_loss(cases(name, on))


@every_method
def test_every_client_is_evaluated_on_its_own_examples(name: str, on: str, cases: Cases) -> None:
    checks.clients_are_evaluated_on_their_own_examples(cases(name, on))


@every_method
def test_costs_count_what_is_exchanged(name: str, on: str, cases: Cases) -> None:
    checks.costs_count_what_is_exchanged(cases(name, on))


def test_there_is_a_method_of_each_family() -> None:
    families = [METHODS[name].family for name in FAMILIES]
    assert sorted(families) == sorted({method.family for method in METHODS.values()})


def on_kinds(names: Sequence[str], slow: Callable[[str, int], bool]) -> pytest.MarkDecorator:
    """A test of these methods on each kind of task that they can train: in the slow part where
    ``slow`` says so of a method and a kind's number, or else in the long one."""
    pairs = [
        pytest.param(
            name, on, id=f"{name}-{on}",
            marks=pytest.mark.slow if slow(name, number) else pytest.mark.long,
        )
        for name in names
        for number, on in enumerate(OBJECTIVES)
        if name not in kinds.refused(on)
    ]  # fmt: skip
    return pytest.mark.parametrize(("name", "on"), pairs)


def each_family(name: str, number: int) -> bool:
    """One method of each family on every other kind of task, the others on every eighth."""
    return (list(METHODS).index(name) + number) % (2 if name in FAMILIES else 8) == 0


@pytest.mark.parametrize(
    "on",
    [
        pytest.param(kind, marks=[] if kind in ("classification", "instruct") else pytest.mark.slow)
        for kind in OBJECTIVES
    ],
)
def test_methods_that_cannot_train_a_kind_of_task_say_so_by_name(on: str, cases: Cases) -> None:
    for name in METHODS:
        case = cases(name, on)
        reason = refusal(case.method, case.subject)
        assert bool(reason) == (name in kinds.refused(on)), reason
        assert not reason or (name in reason and "\n" not in reason)


@pytest.mark.slow
def test_before_any_training_a_model_is_the_pretrained_one() -> None:
    plain = Task(kinds.backbone("instruct"))
    ids = torch.arange(3, 15).view(2, 6)
    batch = {"input_ids": ids, "attention_mask": torch.ones(2, 6)}
    for name in METHODS:
        if name not in kinds.refused("instruct"):
            task = Task(kinds.backbone("instruct"), CASES[name].adapt)
            assert task.pretrained_logits(batch).equal(plain.logits(plain.state, batch)), name


@on_kinds(list(METHODS), slow=each_family)
def test_a_method_trains_a_kind_of_task(name: str, on: str, cases: Cases) -> None:
    case = cases(name, on)
    checks.runs(case)
    task, shared = case.task(), {*case.first_round(0).upload, *case.whole.last.server}
    assert not [name for name in shared if case.method.is_private(task, name)]
    checks.clients_are_evaluated_on_their_own_examples(case)


@on_kinds(list(METHODS), slow=each_family)
def test_clients_of_a_kind_of_task_are_trained_together(name: str, on: str, cases: Cases) -> None:
    # the factors of a sum whose singular values lie close together follow its last bits; losses
    # depend on the sum alone. FedMerge divides small weights by the largest of them, and their
    # rounding with them
    error = {"flexlora": float("inf"), "fedmerge": 1e-4}.get(name, 2e-5)
    checks.sequential_equals_vectorised(cases(name, on), error)
    checks.padding_is_invisible(cases(name, on))


@on_kinds(FAMILIES, slow=lambda name, number: (FAMILIES.index(name) + number) % 4 == 0)
def test_the_loss_of_a_kind_of_task_falls(name: str, on: str, cases: Cases) -> None:
    checks.training_lowers_the_loss(cases(name, on))
