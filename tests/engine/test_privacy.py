"""Differential privacy in the loop: sensitivity, equal shares, who is refused, and equal bits."""

from __future__ import annotations

import json
import math
import shutil
import stat
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedtailor as ft
from fedtailor.engine.config import CohortConfig, EngineConfig, Plan
from fedtailor.engine.faults import ClientFaults, FaultConfig
from fedtailor.engine.prepare import client_works, first_server, memory_states
from fedtailor.engine.rounds import rounds
from fedtailor.errors import InputError
from fedtailor.method import Method
from fedtailor.methods import METHODS
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.fedbn import FedBN
from fedtailor.methods.fedem import FedEM
from fedtailor.methods.fedper import FedPer
from fedtailor.methods.fedsdg import FedSDG
from fedtailor.methods.local import Local
from fedtailor.optim import Optimiser
from fedtailor.params import Params
from fedtailor.random import generator
from fedtailor.report.comparison import compare, to_text
from fedtailor.report.table import table
from fedtailor.runs.run import dry_run
from fedtailor.store.read import read
from fedtailor.task.backbone import Backbone
from fedtailor.task.task import Task
from fedtailor.uploads.accounting import PrivacyConfig, account
from fedtailor.uploads.attacks import AttackConfig
from fedtailor.uploads.norms import norm, update_norm
from fedtailor.uploads.private import Private
from fedtailor.uploads.rules import Robust
from tests.engine.test_norm_bound import lying
from tests.small import DigitsNet, digits_backbone, digits_federation, same_bits

FEDERATION = digits_federation((9, 3, 12, 1, 7))
PRIVACY = PrivacyConfig(noise=0.8, clip=0.01)
PLAN = Plan(
    rounds=2,
    local=ft.LocalConfig(batch_size=8),
    engine=EngineConfig("sequential"),
    privacy=PRIVACY,
)


def backbone() -> Backbone:
    """The digits network without running statistics."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = DigitsNet()
        net.norm = nn.Identity()
        return Backbone(net, blocks=(("hidden",),), head=("head",), name="digits net")


def server_after(
    method: Method, plan: Plan = PLAN, federation: ft.Federation = FEDERATION, **more: Any
) -> Params:
    *_, last = rounds(method, Task(backbone(), method.adapt), federation, plan, **more)
    return last.server


def test_a_round_is_the_plain_mean_of_clipped_updates_and_noise() -> None:
    """Whatever the clients' numbers of examples are."""
    method = FedAvg()
    plan = replace(PLAN, rounds=1)
    task = Task(backbone(), method.adapt)
    server = first_server(method, task, FEDERATION)
    link = client_works(method, task, FEDERATION, plan).train.chain.links[0]
    assert link == Private(clip=0.01, noise=0.8, cohort=5, method="fedavg")
    sent: list[Params] = []

    class Seen(Private):
        def receive(self, upload: Params, at: Any) -> Params:
            sent.append(upload)
            return super().receive(upload, at)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedtailor.engine.prepare.Private", Seen)
        made = server_after(method, plan)
    sent = sent[-5:]  # before them one shows what the method sends
    norms = [norm(one.values()) for one in sent]
    assert max(norms) <= 0.01
    assert sum(one > 0.00999 for one in norms) >= 3  # the others are shorter by themselves
    draws = generator(0, 1, "privacy", "fedavg")
    for name in sorted(server):
        noise = 0.0016 * draws.standard_normal(tuple(server[name].shape))
        mean = torch.stack([one[name] for one in sent]).double().mean(0)
        expected = server[name].double() + mean + torch.from_numpy(noise)
        assert torch.allclose(made[name].double(), expected, atol=1e-6)


def test_a_client_that_drops_out_counts_as_one_that_changes_nothing() -> None:
    """The others' updates are divided by the cohort that was drawn, so nobody else's part grows."""
    plan = replace(PLAN, rounds=1)
    gone = FaultConfig(by_client=(ClientFaults((3,), drop_after=1.0),))
    without = server_after(FedAvg(), replace(plan, faults=gone))
    assert 0.9 * 0.01 / 5 < update_norm(server_after(FedAvg(), plan), without) <= 0.01 / 5 * 1.001


@pytest.mark.parametrize("on_divergence", ["stop", "skip"])
def test_a_client_whose_numbers_are_not_finite_counts_as_one_that_changes_nothing(
    on_divergence: Any,
) -> None:
    """Nobody else sees that it is so: a run that stops, or goes on without it, would tell."""
    plan = replace(PLAN, rounds=1, engine=EngineConfig("sequential", on_divergence=on_divergence))
    gone = FaultConfig(by_client=(ClientFaults((2,), drop_after=1.0),))
    method = lying(FedAvg, 2, math.nan)()
    *_, last = rounds(method, Task(backbone(), method.adapt), FEDERATION, plan)
    assert last.cohort.clients == (0, 1, 2, 3, 4)
    assert not last.notes
    assert last.losses[2] == 0 < min(last.losses[k] for k in (0, 1, 3, 4))
    assert last.unchanged == (2,)
    without = server_after(FedAvg(), replace(plan, faults=gone))
    for name, value in without.items():
        assert torch.allclose(last.server[name], value, atol=1e-7)


def test_what_a_client_keeps_stays_as_it_was_where_it_is_no_longer_finite() -> None:
    method = lying(FedPer, 2, math.inf)()
    task = Task(backbone(), method.adapt)
    store = memory_states(method, task, FEDERATION)
    before = {k: store.read(k) for k in (1, 2)}
    list(rounds(method, task, FEDERATION, replace(PLAN, rounds=1), store=store))
    assert "head.bias" in before[2]
    assert same_bits(store.read(2), before[2])
    assert not same_bits(store.read(1), before[1])


@pytest.mark.slow
def test_cohorts_by_chance_differ_in_size_and_one_of_nobody_changes_nothing() -> None:
    federation = digits_federation((3,) * 6, seed=1)
    privacy = replace(PRIVACY, sampling="poisson", delta=0.9)
    plan = replace(PLAN, rounds=6, cohort=CohortConfig(size=1), privacy=privacy)
    task = Task(backbone(), FedAvg().adapt)
    done = list(rounds(FedAvg(), task, federation, plan))
    sizes = [len(one.cohort.clients) for one in done]
    assert 0 in sizes
    assert len(set(sizes)) > 2
    for before, after in pairwise(done):
        assert same_bits(before.server, after.server) == (not after.cohort.clients)
        assert bool(after.notes) == (not after.cohort.clients)
    told = [federation.cohort(number, 2, poisson=True) for number in range(2000)]
    assert np.mean([len(one) for one in told]) == pytest.approx(2, abs=0.1)
    drawn = Counter(client for one in told for client in one)
    assert all(count / 2000 == pytest.approx(1 / 3, abs=0.04) for count in drawn.values())


def test_noise_and_cohorts_follow_from_the_servers_secret_alone() -> None:
    plan = replace(PLAN, rounds=1, cohort=CohortConfig(size=2))
    one, same, other = (replace(FEDERATION, secret=secret) for secret in ("a", "a", "b"))
    made = [server_after(FedAvg(), plan, federation) for federation in (one, same, other)]
    assert same_bits(made[0], made[1])
    assert not same_bits(made[0], made[2])
    cohorts = [
        [federation.cohort(number, 2) for number in range(9)]
        for federation in (FEDERATION, one, other)
    ]
    assert cohorts[0] != cohorts[1] != cohorts[2]


@pytest.mark.parametrize("value", [-1.0, 1e12])
def test_other_data_of_a_client_change_the_mean_by_at_most_two_bounds_of_m(value: float) -> None:
    """Client 2 lies, or nobody does. The noise is the same in both, and cancels."""
    plan = replace(PLAN, rounds=1)
    one, other = (server_after(lying(FedAvg, k, value)(), plan) for k in (5, 2))
    assert 0.5 * 0.01 / 5 < update_norm(one, other) <= 2 * 0.01 / 5 * (1 + 1e-4)


@pytest.mark.parametrize(
    "name",
    [n for n, m in METHODS.items() if m().averages and n != "fedbn"] + ["fedsdg"],
)
def test_a_client_and_the_server_measure_from_the_same_state(name: str) -> None:
    """What the client takes off, the server adds again: no update and no noise is no change."""
    method = FedSDG(aggregation="uniform") if name == "fedsdg" else METHODS[name]()
    still = replace(method, optimiser=Optimiser(lr=1e-30))
    task = Task(backbone(), still.adapt)
    server = first_server(still, task, FEDERATION)
    received = still.send(task, server, 1)
    private = still.init_client(task, 1, torch.tensor(1))
    state = {n: v for n, v in {**received, **private}.items() if not still.is_private(task, n)}
    upload = still.upload(task, received, state)
    there, here = (still.unchanged(task, one, upload) for one in (received, server))
    assert same_bits(there, here)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["processes", "vectorised"])
@pytest.mark.parametrize("method", [FedPer(), FedSDG(aggregation="uniform")])
def test_executors_draw_the_same_noise(method: Method, executor: Any) -> None:
    plan = replace(PLAN, engine=EngineConfig(executor, processes=2))
    alone, together = server_after(method), server_after(method, plan)
    if executor == "processes":
        assert same_bits(alone, together)
    for name, value in alone.items():
        assert torch.allclose(together[name], value, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "fedsdg",
            "releases weights from each update's direction.* Set aggregation to uniform, or",
        ),
        ("fedmerge", "releases each client's weights of the models, and .* alone. Leave"),
        ("pfedgate", "releases which blocks a client touched"),
        ("scaffold", "releases the length of each client's path"),
        ("flexlora", "releases each client's factors, by its rank"),
        ("ifca", "releases the model that a client chose"),
        ("fedmd", "releases its scores on public examples"),
        ("heterofl", "releases which units a client has"),
    ],
)
def test_a_method_whose_uploads_noise_does_not_cover_is_refused(name: str, said: str) -> None:
    with pytest.raises(InputError, match=f"privacy: .*{said}"):
        server_after(METHODS[name]())


@pytest.mark.parametrize("method", [FedAvg(), FedEM()])
def test_running_statistics_are_refused_and_private_ones_are_not(method: Method) -> None:
    def go(one: Method) -> None:
        next(rounds(one, Task(digits_backbone(), one.adapt), FEDERATION, PLAN))

    with pytest.raises(InputError, match="sends running statistics"):
        go(method)
    go(FedBN())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cohort": CohortConfig(max_share=0.5)}, "cohort.max_share"),
        ({"cohort": CohortConfig(above_norm="clip")}, "cohort.above_norm"),
        ({"cohort": CohortConfig(max_norm=1.0)}, "cohort.max_norm"),
        ({"attack": AttackConfig("scaling")}, "attack.kind"),
    ],
)
def test_settings_that_break_the_account_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=f"{said} does not go with \\[privacy\\]"):
        server_after(FedAvg(), replace(PLAN, **changes))


def test_noise_of_the_clients_needs_masks_and_cohorts_that_are_no_secret() -> None:
    with pytest.raises(InputError, match="without masks the server would see each client's update"):
        server_after(FedAvg(), replace(PLAN, privacy=replace(PRIVACY, noise_by="clients")))
    with pytest.raises(InputError, match=r"privacy\.noise_by = 'clients' is for privacy"):
        replace(PRIVACY, noise_by="clients", level="record")


def test_robust_rules_are_refused() -> None:
    with pytest.raises(InputError, match=r"robust does not go with \[privacy\]"):
        server_after(FedAvg(robust=Robust("median")))


def test_training_alone_spends_nothing() -> None:
    task = Task(backbone(), Local().adapt)
    plain = memory_states(Local(), task, FEDERATION)
    noised = memory_states(Local(), task, FEDERATION)
    done = list(rounds(Local(), task, FEDERATION, PLAN, store=noised))
    list(rounds(Local(), task, FEDERATION, replace(PLAN, privacy=PrivacyConfig()), store=plain))
    assert done[-1].privacy is None
    assert same_bits(plain.read(2), noised.read(2))


EXPERIMENT = ft.Experiment(
    {"fedper": FedPer(), "local": Local()},
    rounds=3,
    data=ft.DataConfig(name="digits", limit=200),
    split=ft.SplitConfig(6),
    model=ft.ModelConfig("lenet", pretrained=False, image_size=16, width=0.2),
    local=ft.LocalConfig(batch_size=8, steps=1),
    cohort=CohortConfig(size=2),
    engine=EngineConfig("sequential"),
    privacy=PrivacyConfig(epsilon=20.0, clip=0.5, secret=False),
)


@pytest.mark.slow
def test_a_run_says_what_it_spends_and_goes_on_with_its_account(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, halved = tmp_path / "whole", tmp_path / "halved"
    ft.run(EXPERIMENT, whole)
    shown = capsys.readouterr().err
    found = account(EXPERIMENT.privacy, 6, 2, 3)
    said = f"privacy   {found.words(0.5)}; delta is 6^-1.1, by the number of clients; delta is the"
    assert said in shown
    stop = {"summary": False, "scores": False}
    ft.run(EXPERIMENT, halved, on_round=lambda done: ft.STOP if done.number == 1 else None, **stop)
    ft.run(EXPERIMENT, halved, **stop)
    logs = [out / "methods/fedper/seed-0/history.jsonl" for out in (whole, halved)]
    assert logs[0].read_bytes() == logs[1].read_bytes()
    assert not list(whole.rglob("secret.json"))
    lines = [json.loads(line) for line in logs[0].read_text().splitlines()]
    assert [line["epsilon"] for line in lines] == [found.spent(t).epsilon for t in (1, 2, 3)]
    assert {(line["noise"], line["delta"]) for line in lines} == {(found.noise, found.delta)}
    assert "epsilon" not in (whole / "methods/local/seed-0/history.jsonl").read_text()
    states = sorted(whole.glob("methods/fedper/**/*.safetensors"))
    assert states
    for path in states:
        assert path.read_bytes() == (halved / path.relative_to(whole)).read_bytes()

    text = to_text(table([read(whole)]))
    said = f"epsilon {lines[-1]['epsilon']:.4g} at delta {found.delta:.3g} after round 3"
    assert f"whole: fedper: {said}" in " ".join(text.split())
    found_table = table([read(whole)])
    assert {row.label: row.epsilon for row in found_table.rows} == {
        "fedper": lines[-1]["epsilon"], "local": None,
    }  # fmt: skip
    told = f"Of privacy the rounds have spent epsilon {lines[-1]['epsilon']:.4g} with fedper."
    assert told in found_table.verdicts[0].text

    assert "not covered; for experiments alone: the seed tells the noise" in " ".join(text.split())
    for other in (2, 4):
        with pytest.raises(InputError, match=r"the noise is for privacy\.epsilon = 20\.0 over 3"):
            ft.run(replace(EXPERIMENT, rounds=other), whole)
    with pytest.raises(InputError, match="its rounds are spent, and can't be taken back"):
        ft.rollback(whole, "fedper")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cohort", "privacy"),
    [
        (40, PrivacyConfig(epsilon=10.0, noise=4.0, clip=1.0)),
        (50, PrivacyConfig(epsilon=0.97, noise=4.0, clip=1.0)),
        (10, PrivacyConfig(epsilon=4.0, noise=1.0, clip=1.0, sampling="poisson")),
    ],
)
def test_a_budget_has_as_many_rounds_however_many_are_asked_for(
    cohort: int, privacy: PrivacyConfig
) -> None:
    """The accountant, and the part of delta for cohorts of nobody, differ by the number."""
    federation = digits_federation((1,) * 100)
    plan = replace(PLAN, cohort=CohortConfig(size=cohort), privacy=replace(privacy, stop="budget"))
    found = {replace(plan, rounds=asked).within_budget(federation) for asked in (100, 1500)}
    assert len(found) == 1
    (most,) = found
    assert most >= 1
    for rounds_ in (most, most + 1):
        limited = replace(plan, rounds=rounds_, privacy=privacy)
        if rounds_ == most:
            limited.account(federation)
            continue
        with pytest.raises(InputError, match=rf"allowed: rounds up to {most} \("):
            limited.account(federation)


@pytest.mark.slow
@pytest.mark.parametrize(
    "privacy",
    [
        PrivacyConfig(epsilon=4.0, noise=1.5, clip=0.5, secret=False, stop="budget"),
        PrivacyConfig("record", epsilon=4.0, noise=0.7, clip=0.5, secret=False, stop="budget"),
    ],
    ids=["clients", "records"],
)
def test_a_run_ends_with_its_budget(
    privacy: PrivacyConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same call finds it finished, also without ``stop``."""
    experiment = replace(EXPERIMENT, rounds=40, privacy=privacy)
    quiet: dict[str, Any] = {"summary": False, "scores": False}
    for epsilon in (4.0, 4.0, 5.0):
        found = replace(experiment, privacy=replace(privacy, epsilon=epsilon))
        out = ft.run(found, tmp_path / f"epsilon-{epsilon}", **quiet).path
        (trial,) = read(out, ("fedper", 0)).trials
        done = trial.history[-1].round
        assert 1 <= done < 40
        assert trial.history[-1].epsilon <= epsilon
        refused = replace(found, rounds=done + 1, privacy=replace(found.privacy, stop=None))
        with pytest.raises(InputError, match=rf"rounds up to {done} \(or privacy\.stop"):
            ft.run(refused, tmp_path / "refused", **quiet)
    plain = replace(experiment, rounds=done, privacy=replace(found.privacy, stop=None))
    ft.run(plain, tmp_path / "plain", **quiet)
    shown = dry_run(found, tmp_path / "none").privacy
    assert f"after {done} rounds, of a" in shown
    assert "; 40 rounds would spend more: privacy.stop" in shown
    for one in (found, plain):
        assert ft.run(one, out).path == out
        assert f"{out} is finished: nothing is left to run" in capsys.readouterr().err
    states = [
        tmp_path / n / "methods/fedper/seed-0/server.safetensors" for n in ("plain", out.name)
    ]
    assert states[0].read_bytes() == states[1].read_bytes()
    by_clients = privacy.level == "record"
    assert ("the clients add the noise" in " ".join(compare([out]).split())) == by_clients


@pytest.mark.slow
def test_a_run_keeps_its_secret_for_its_owner_and_goes_on_with_it(tmp_path: Path) -> None:
    experiment = replace(EXPERIMENT, privacy=replace(EXPERIMENT.privacy, secret=True))
    stop: dict[str, Any] = {"summary": False, "scores": False}

    def after_one(done: ft.CommittedRound) -> object:
        return ft.STOP if done.number == 1 else None

    for name in ("one", "other"):
        ft.run(experiment, tmp_path / name, on_round=after_one, **stop)
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "one", copy)
    for name in ("one", "copy"):
        ft.run(experiment, tmp_path / name, **stop)
    states = [next((tmp_path / n).glob("methods/fedper/seed-0/server*")) for n in ("one", "copy")]
    assert states[0].read_bytes() == states[1].read_bytes()
    paths = sorted(tmp_path.rglob("fedper/seed-0/secret.json"))
    assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o600] * 3
    assert len({path.read_text() for path in paths}) == 2  # a copy's is the same


def test_an_experiment_that_goes_on_from_a_run_is_refused() -> None:
    with pytest.raises(InputError, match=r"start_from = 'runs/x' with \[privacy\]"):
        replace(EXPERIMENT, start_from=ft.StartConfig("runs/x"))
