from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import pytest
import torch
from torch import Tensor, nn

from fedtailor import random
from fedtailor.data.config import LocalConfig
from fedtailor.engine.config import CohortConfig, EngineConfig, Plan, ScheduleConfig
from fedtailor.engine.faults import FaultConfig
from fedtailor.engine.prepare import memory_states
from fedtailor.engine.rounds import rounds
from fedtailor.errors import DivergedError, InputError
from fedtailor.method import Cohort, Method
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedavg_ft import FedAvgFT
from fedtailor.methods.fedsdg import FedSDG
from fedtailor.methods.local import Local
from fedtailor.optim import ClientContext, Optimiser
from fedtailor.params import Batch, Params, encode
from fedtailor.task.backbone import Backbone
from fedtailor.task.task import Task
from fedtailor.uploads.rules import Robust
from tests.small import digits_backbone, digits_federation, same_bits

FEDERATION = digits_federation()
PLAN = Plan(rounds=2, local=LocalConfig(batch_size=8), cohort=CohortConfig(size=3))


def last_round(method, plan=PLAN, federation=FEDERATION, precision="fp32"):
    task = Task(digits_backbone(), method.adapt, precision=precision)
    *_, last = rounds(method, task, federation, plan)
    return last


@dataclass(frozen=True)
class Spoilt(Local):
    """Local in cohorts that are drawn, of which one client's model is spoilt."""

    client: int = 0
    trains_alone: ClassVar[bool] = False

    def init_client(self, task: Task, client: int, key: Tensor) -> Params:
        state = super().init_client(task, client, key)
        return {n: v * torch.nan for n, v in state.items()} if client == self.client else state


@dataclass(frozen=True)
class Overflowing(FedAvg):
    """FedAvg, of which one client sends the largest finite values, and the server doubles them."""

    client: int = 0
    name = "overflowing"

    def send(self, task: Task, server: Params, client: int) -> Params:
        spoilt = torch.tensor(float(client == self.client))
        return {**server, "spoilt": spoilt}

    def local(
        self, task: Task, state: Params, batches: Sequence[Batch], context: ClientContext
    ) -> tuple[Params, Tensor]:
        spoilt = state.pop("spoilt")
        trained, loss = super().local(task, state, batches, context)
        largest = torch.finfo(torch.float32).max
        trained["head.bias"] = torch.where(spoilt > 0, largest, trained["head.bias"])
        return trained, loss

    def aggregate(self, task: Task, server: Params, uploads: Params, cohort: Cohort) -> Params:
        mean = super().aggregate(task, server, uploads, cohort)
        return {name: value * 1e6 / 1e6 for name, value in mean.items()}


def test_a_method_that_trains_alone_trains_every_client_equally_whoever_drops_out() -> None:
    """Five rounds of two of five clients are two trainings each. The first stands for rounds 1 and
    2, the second for 3 to 5, at their mean rates: (1 + 0.8) / 2 and (0.6 + 0.4 + 0.2) / 3."""
    method = Local(optimiser=Optimiser("sgd", lr=0.1))
    task = Task(digits_backbone(), method.adapt)
    plan = replace(
        PLAN,
        rounds=5,
        cohort=CohortConfig(size=2),
        schedule=ScheduleConfig("linear"),
        faults=FaultConfig(drop_before=0.9, partial=0.1),
    )
    done = list(rounds(method, task, FEDERATION, plan))
    assert [one.cohort.clients for one in done] == [(0, 1), (2, 3), (0, 4), (1, 2), (3, 4)]
    assert [round(one.lr_scale, 6) for one in done] == [0.9, 0.9, 0.9, 0.4, 0.4]
    # nobody is evaluated before all have trained
    assert [bool(one.evaluations) for one in done] == [False, False, True, True, True]
    sizes = [FEDERATION.num_steps(client, plan.local) for client in range(5)]
    assert [one.steps for one in done] == [
        tuple(sizes[client] for client in one.cohort.clients) for one in done
    ]


def test_nothing_is_kept_of_a_round_once_a_client_has_diverged() -> None:
    cohort = FEDERATION.cohort(1, 3)
    first = min(cohort, key=lambda client: (FEDERATION.num_steps(client, PLAN.local), client))
    method = Spoilt(client=first)
    task = Task(digits_backbone(), method.adapt)
    store = memory_states(method, task, FEDERATION)
    before = {client: store.read(client) for client in cohort if client != first}
    with pytest.raises(InputError, match="round 1 of local"):
        next(rounds(method, task, FEDERATION, PLAN, store=store))
    assert all(same_bits(store.read(client), old) for client, old in before.items())


def test_the_schedule_scales_the_local_step() -> None:
    method = FedAvg(optimiser=Optimiser("sgd", lr=0.1))
    plan = replace(PLAN, rounds=1)
    full = last_round(method, plan)
    half = last_round(
        replace(method, optimiser=Optimiser("sgd", lr=0.2)),
        replace(plan, schedule=ScheduleConfig(warmup_rounds=1)),  # factor 1/2
    )
    assert half.lr_scale == 0.5
    for name, value in full.server.items():
        torch.testing.assert_close(half.server[name], value)


def test_batch_norm_statistics_are_averaged() -> None:
    before = Task(digits_backbone()).state
    after = last_round(FedAvg(), replace(PLAN, rounds=1)).server
    assert not after["norm.running_mean"].equal(before["norm.running_mean"])
    assert "norm.num_batches_tracked" not in after


def test_uploads_on_disk_change_nothing() -> None:
    small = replace(PLAN, engine=EngineConfig(upload_memory_mb=1e-6))
    stacked = FedAvg(robust=Robust("multi-krum", keep=2))
    one, two = last_round(stacked), last_round(stacked, small)
    assert all(one.server[name].equal(two.server[name]) for name in one.server)


def test_a_loss_that_is_not_finite_names_client_and_round() -> None:
    with pytest.raises(
        InputError, match=r"client \d (is|has).*(nan|inf|finite) in round 1 of fedavg"
    ):
        last_round(FedAvg(optimiser=Optimiser("sgd", lr=1e30)))


def test_the_last_step_of_a_round_is_checked_too() -> None:
    """One step: its loss is still finite, what it leaves behind is not."""
    plan = replace(PLAN, rounds=1, local=LocalConfig(steps=1), cohort=CohortConfig())
    with pytest.raises(
        InputError, match=r"client 0 has trained .* not finite in round 1 of fedavg"
    ):
        last_round(FedAvg(optimiser=Optimiser("sgd", lr=float("inf"))), plan)


def test_bf16_trains_fp32_masters_near_fp32() -> None:
    """A small rate: bfloat16's rounding is what differs, and not what training makes of it."""
    method = FedAvg(optimiser=Optimiser("sgd", lr=0.01))
    exact, rough = last_round(method), last_round(method, precision="bf16")
    start = Task(digits_backbone(), method.adapt).state
    for name, value in rough.server.items():
        assert value.dtype == torch.float32
        moved = exact.server[name] - start[name]
        assert 0 < (value - exact.server[name]).norm() < 0.1 * moved.norm()


def test_local_trains_like_one_client_fedavg() -> None:
    """A federation of one is local training: the shared and the private model are the same."""
    alone = digits_federation((20,))
    plan = replace(PLAN, rounds=3)
    shared = last_round(FedAvg(), plan, alone).server
    method = Local()
    task = Task(digits_backbone(), method.adapt)
    store = memory_states(method, task, alone)
    list(rounds(method, task, alone, plan, store=store))
    assert all(store.read(0)[name].equal(shared[name]) for name in shared)


@pytest.mark.slow
def test_fine_tuning_leaves_training_alone() -> None:
    tuned, plain = last_round(FedAvgFT()), last_round(FedAvg())
    assert all(tuned.server[name].equal(plain.server[name]) for name in plain.server)
    tests = {(e.model, e.split): e.loss for e in tuned.evaluations}
    assert (
        tests["global", "test"]
        == {(e.model, e.split): e.loss for e in plain.evaluations}["global", "test"]
    )
    assert tests["personal", "test"] != tests["global", "test"]


def test_clients_outside_the_cohort_keep_their_private_state() -> None:
    method = FedSDG(rank=2)
    task = Task(digits_backbone(), method.adapt)
    store = memory_states(method, task, FEDERATION)
    start = {k: store.read(k) for k in range(5)}
    done = next(iter(rounds(method, task, FEDERATION, PLAN, store=store)))
    for client in range(5):
        same = all(store.read(client)[n].equal(v) for n, v in start[client].items())
        assert same == (client not in done.cohort.clients)


def test_clients_start_from_private_parts_of_their_own() -> None:
    method = FedSDG(rank=2)
    store = memory_states(method, Task(digits_backbone(), method.adapt), FEDERATION)
    one, two = store.read(0), store.read(1)
    assert not one["hidden.private.A"].equal(two["hidden.private.A"])
    assert one["gate_logits"].equal(two["gate_logits"])


@dataclass(frozen=True)
class Thrifty(Method):
    """FedAvg of the first half of a vector, the other half kept by a private mask; and what else
    the engine offers: budgets by client, packed uploads, results by example, observations."""

    name = "thrifty"
    family = "sparse"
    limit: int = 5

    def check(self, task: Task, num_clients: int, cohort_size: int, rounds: int) -> None:
        if num_clients > self.limit:
            raise InputError(f"{num_clients} clients of {cohort_size}, {rounds}: too many")

    def is_private(self, task: Task, name: str) -> bool:
        return name == "budget"

    def init_client(self, task: Task, client: int, key: Tensor) -> Params:
        return {"budget": torch.tensor(client)}

    def local(
        self, task: Task, state: Params, steps: Sequence[Batch], context: ClientContext
    ) -> tuple[Params, Tensor]:
        assert all("cached.dark" in batch for batch in steps)
        dark = steps[0]["cached.dark"].mean()
        return {**state, "head.bias": state["head.bias"] + state["budget"]}, dark

    def upload(self, task: Task, received: Params, trained: Params) -> Params:
        return {"half": trained["head.bias"][:5].clone()}

    def pack(self, task: Task, upload: Params) -> Params:
        return {"kept": upload["half"][upload["half"] != 0], "where": upload["half"] != 0}

    def unpack(self, task: Task, packed: Params) -> Params:
        half = torch.zeros(5)
        half[packed["where"]] = packed["kept"]
        return {"half": half}

    def aggregate(self, task: Task, server: Params, uploads: Params, cohort: Cohort) -> Params:
        noise = random.uniform(cohort.key, (1,))
        bias = torch.cat([uploads["half"].mean(0), noise, server["head.bias"][6:]])
        return {**server, "head.bias": bias}

    def precompute(self, task: Task, batch: Batch) -> Params:
        return {"dark": batch["pixel_values"].mean((1, 2, 3))}

    def server_diagnostics(self, task: Task, server: Params, clients: Sequence[int]) -> Params:
        return {"bias": server["head.bias"]}

    def client_diagnostics(self, task: Task, state: Params, batch: Batch) -> Params:
        return {"budget": state["budget"], "darkest": batch["cached.dark"].min()}


@pytest.mark.parametrize("executor", ["sequential", "vectorised"])
def test_budgets_packed_uploads_results_by_example_and_observations(executor: str) -> None:
    method, everyone = Thrifty(), CohortConfig()
    engine = EngineConfig(executor)  # type: ignore[arg-type]
    task = Task(digits_backbone())
    task.state["head.bias"].zero_()
    done = next(rounds(method, task, FEDERATION, replace(PLAN, cohort=everyone, engine=engine)))
    assert done.server["head.bias"][:5].tolist() == [2.0] * 5  # mean of budgets 0 to 4
    key = random.key(0, 1, "aggregate")
    assert done.server["head.bias"][5] == random.uniform(key, (1,))[0]
    sizes = [len(encode(method.pack(task, {"half": torch.full((5,), float(k))}))) for k in range(5)]
    assert sizes[0] < sizes[1]
    assert done.bytes_up == sum(sizes)
    assert done.diagnostics["clients"].tolist() == [0, 1, 2, 3, 4]
    assert done.diagnostics["client/budget"].tolist() == [0, 1, 2, 3, 4]
    assert done.diagnostics["server/bias"].equal(done.server["head.bias"])
    darkest = FEDERATION.dataset.batch(FEDERATION.rows(3, "validation"))["pixel_values"]
    expected = darkest.mean((1, 2, 3)).min()
    torch.testing.assert_close(done.diagnostics["client/darkest"][3], expected)


def test_settings_that_do_not_fit_are_refused_before_the_first_round() -> None:
    with pytest.raises(InputError, match="5 clients of 3, 2: too many"):
        next(rounds(Thrifty(limit=4), Task(digits_backbone()), FEDERATION, PLAN))


def test_without_a_cache_nothing_is_added_to_batches() -> None:
    plan = replace(PLAN, engine=EngineConfig(cache_mb=0.0))
    with pytest.raises(AssertionError):
        next(rounds(Thrifty(), Task(digits_backbone()), FEDERATION, plan))


def test_somebody_must_take_part() -> None:
    plan = replace(PLAN, cohort=CohortConfig(novel=5))
    with pytest.raises(InputError, match=r"novel = 5 leaves none of 5 clients .* allowed: 0 to 4"):
        last_round(FedAvg(), plan)


@pytest.mark.parametrize("rule", ["none", "multi-krum"])
def test_an_upload_that_breaks_the_sums_is_left_out(rule: Literal["none", "multi-krum"]) -> None:
    """Stacked uploads, and a mean that is taken as they come."""
    method = Overflowing(client=2, robust=Robust(rule, keep=5 if rule == "multi-krum" else None))
    everyone = replace(PLAN, rounds=1, cohort=CohortConfig(above_norm="keep"))
    with pytest.raises(DivergedError, match=r"server's next state is not finite in round 1 of"):
        last_round(method, everyone)
    done = last_round(method, replace(everyone, engine=EngineConfig(on_divergence="skip")))
    assert done.cohort.clients == (0, 1, 3, 4)
    assert len(done.losses) == len(done.steps) == 4
    assert all(value.isfinite().all() for value in done.server.values())
    (note,) = done.notes
    reason = "with its upload, head.bias of the server's next state is not finite"
    assert note == f"without client 2: {reason}"


def test_a_client_that_diverges_can_be_left_out() -> None:
    skip = replace(PLAN, rounds=1, cohort=CohortConfig(), engine=EngineConfig(on_divergence="skip"))
    task = Task(digits_backbone(), Spoilt().adapt)
    store = memory_states(Spoilt(client=3), task, FEDERATION)
    (done,) = rounds(Spoilt(client=3), task, FEDERATION, skip, store=store)
    assert done.cohort.clients == (0, 1, 2, 4)
    assert done.notes == ("without client 3: the loss of client 3 is nan",)
    assert all(v.isfinite().all() for k in (0, 1, 2, 4) for v in store.read(k).values())


def test_a_share_that_no_cohort_can_hold_is_told() -> None:
    message = r"max_share = 0\.1: of the 5 clients .* 1/5; allowed: 0\.2 \(all count alike\) to 1"
    with pytest.raises(InputError, match=message):
        last_round(FedAvg(), replace(PLAN, cohort=CohortConfig(max_share=0.1)))


def test_the_share_of_a_client_that_says_it_has_most_examples_is_cut() -> None:
    """For a method that takes a mean as uploads come as for one that stacks them."""
    federation = digits_federation((5, 5, 100))
    plan = replace(PLAN, rounds=1, cohort=CohortConfig(max_share=0.34))
    equal = last_round(Plain(), replace(plan, cohort=CohortConfig()), federation)
    for robust in (Robust(), Robust("multi-krum", keep=3)):
        cut = last_round(FedAvg(robust=robust), plan, federation)
        for name, value in equal.server.items():
            torch.testing.assert_close(cut.server[name], value, rtol=0.02, atol=0.01)


@dataclass(frozen=True)
class Plain(FedAvg):
    """FedAvg with equal weights."""

    name = "plain"

    def client_weights(self, cohort: Cohort) -> Tensor:
        return cohort.uniform


class Normed(nn.Module):
    """Batch normalisation that gets one value of a channel from each picture."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 16)
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 10)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.hidden(pixel_values.flatten(1)))))


@pytest.mark.parametrize("executor", ["sequential", "vectorised"])
def test_batch_normalisation_does_not_train_on_one_example(
    executor: Literal["sequential", "vectorised"],
) -> None:
    """Clients with 9, 8 and 1 examples: the ninth is left out of each epoch, and the third client
    trains nothing."""
    federation = digits_federation((9, 8, 1))
    task = Task(Backbone(Normed(), name="normed"))
    method = Local(optimiser=Optimiser("sgd", lr=0.1))
    plan = Plan(1, LocalConfig(batch_size=4, epochs=2), engine=EngineConfig(executor))
    store = memory_states(method, task, federation)
    done = next(rounds(method, task, federation, plan, store=store))
    assert done.steps == (4, 4, 2)
    before, after = task.state["head.weight"], [store.read(k)["head.weight"] for k in range(3)]
    assert [value.equal(before) for value in after] == [False, False, True]
    with pytest.raises(InputError, match=r"batch_size = 1: .*allowed: 2 or more"):
        next(rounds(method, task, federation, replace(plan, local=LocalConfig(batch_size=1))))
    with pytest.raises(InputError, match="and no client has more; give clients more rows"):
        next(rounds(method, task, digits_federation((1, 1)), plan))
    maps = next(rounds(method, Task(digits_backbone()), federation, plan))
    assert maps.steps == (6, 4, 2)  # a picture has several values of each channel there
