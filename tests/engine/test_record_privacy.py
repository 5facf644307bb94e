"""Differential privacy of records in the loop: sampling, equal numbers, refusals, what is kept."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fedtailor as ft
from fedtailor.data.config import LocalConfig
from fedtailor.data.table import Dataset
from fedtailor.engine.config import CohortConfig, EngineConfig, Plan
from fedtailor.engine.executors.work import ClientRequest
from fedtailor.engine.prepare import client_works, first_server, memory_states
from fedtailor.engine.rounds import rounds
from fedtailor.errors import InputError
from fedtailor.method import Method
from fedtailor.methods import METHODS
from fedtailor.methods.apfl import APFL
from fedtailor.methods.ditto import Ditto
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.feddpa import FedDPA
from fedtailor.methods.fedhft import FedHFT
from fedtailor.methods.fedper import FedPer
from fedtailor.methods.fedsdg import FedSDG
from fedtailor.methods.local import Local
from fedtailor.objectives.regression import Regression
from fedtailor.params import DRAWN, Params
from fedtailor.report.comparison import to_text
from fedtailor.report.table import table
from fedtailor.runs.build import Inputs
from fedtailor.runs.run import dry_run
from fedtailor.store.read import read
from fedtailor.task.backbone import Backbone
from fedtailor.task.task import Task
from fedtailor.uploads.accounting import PrivacyConfig
from tests import kinds
from tests.engine.test_privacy import EXPERIMENT, backbone
from tests.small import digits_backbone, digits_federation, same_bits

FEDERATION = digits_federation((9, 4, 12, 7))
PLAN = Plan(
    rounds=2,
    local=LocalConfig(batch_size=4),
    engine=EngineConfig("sequential"),
    privacy=PrivacyConfig("record", noise=0.8, clip=0.5),
)


def after(method: Method, plan: Plan = PLAN) -> tuple[Params, Params]:
    """The server's state, and what client 2 keeps."""
    task = Task(backbone(), method.adapt)
    store = memory_states(method, task, FEDERATION)
    *_, last = rounds(method, task, FEDERATION, plan, store=store)
    return last.server, store.read(2)


def test_every_example_is_drawn_for_itself() -> None:
    """At the rate, whatever the others are; empty batches are told apart."""
    federation, local, counts = digits_federation((20,)), LocalConfig(batch_size=4), []
    for number in range(60):
        batches = list(federation.sampled(0, number, local, (0,)))
        assert len(batches) == 5
        counts += [int(batch[DRAWN].sum()) for batch in batches]
    assert np.mean(counts) == pytest.approx(4, abs=0.35)
    assert np.var(counts) == pytest.approx(20 * 0.2 * 0.8, rel=0.3)  # a binomial's
    assert 0 in counts
    again, other = (next(federation.sampled(0, 3, local, (seed,))) for seed in (0, 1))
    assert again["labels"].equal(next(federation.sampled(0, 3, local, (0,)))["labels"])
    assert again["pixel_values"].shape != other["pixel_values"].shape or not again[
        "pixel_values"
    ].equal(other["pixel_values"])


def with_target(value: float) -> ft.Federation:
    """Numbers to predict, one of which is this one; it is in every batch of client 2."""
    federation = digits_federation((4, 4, 4, 4))
    data = federation.dataset
    targets = data.labels.astype(np.float32)  # type: ignore[union-attr]
    targets[federation.partition.train[2][0]] = value
    numbers = Dataset(data.inputs, data.num_train, "regression", "x", targets, (), scale=(0.0, 1.0))
    return replace(federation, dataset=numbers)


def regression() -> Backbone:
    found = backbone()
    found.model.head = nn.Linear(16, 1)  # type: ignore[assignment]
    return replace(found, objective=Regression(0.0, 1.0))


@pytest.mark.slow
@pytest.mark.parametrize("target", [1e20, 1.5e19])
def test_a_run_goes_on_whatever_one_record_is(target: float) -> None:
    """Its loss is infinite, or that of several steps; only the noised gradients decide."""
    privacy = PrivacyConfig("record", noise=0.8, clip=0.5, delta=0.1)
    plan = replace(PLAN, privacy=privacy, local=LocalConfig(batch_size=4, steps=8))
    for value in (1.0, target):
        task = Task(regression(), FedAvg().adapt)
        done = list(rounds(FedAvg(), task, with_target(value), plan))
        assert [one.cohort.clients for one in done] == [(0, 1, 2, 3)] * 2
        assert not any(one.notes for one in done)


def test_dropout_in_noised_steps_follows_from_the_secret() -> None:
    """Masks go by an example's place, so whoever knows them sees where a record is missing."""
    method, keys = FedAvg(), set()
    task = Task(backbone(), method.adapt)
    server = first_server(method, task, FEDERATION)
    for secret in (None, "one", "other"):
        works = client_works(method, task, replace(FEDERATION, secret=secret), PLAN)
        request = ClientRequest(2, 1, {}, "train", 1, 1.0, 2)
        keys.add(works.train.prepare(server, request).context.key.item())
    assert len(keys) == 3


@pytest.mark.slow
@pytest.mark.parametrize("method", [FedPer(), Ditto()])
def test_executors_draw_the_same_batches_and_noise(method: Method) -> None:
    alone, kept = after(method)
    together, also = after(method, replace(PLAN, engine=EngineConfig("vectorised")))
    for one, other in ((alone, together), (kept, also)):
        for name, value in one.items():
            assert torch.allclose(other[name], value, atol=1e-5)
    less = replace(PLAN, privacy=replace(PLAN.privacy, noise=0.4))
    assert not same_bits(kept, after(method, less)[1])


def said_of(words: str) -> list[str]:
    """The methods of the rows of the documentation's table that begin so."""
    page = (Path(__file__).parents[2] / "docs/privacy.md").read_text()
    rows = re.findall(r"^\| (.*) \| (.*) \|$", page.partition("## Records instead")[2], re.M)
    return [n for names, what in rows for n in re.split("[,;] ", names) if what.startswith(words)]


RUN = {
    "apfl with `adaptive = false`": APFL(adaptive=False),
    'feddpa with `form = "T"` and `weighting = "fixed"`': FedDPA(form="T", weighting="fixed"),
    "fedhft": FedHFT(warmup_rounds=1, clusters=1),
}


def test_the_documentation_has_every_method() -> None:
    names = [*said_of("one step"), *said_of("two steps"), *said_of("1 +"), *said_of("refused")]
    assert {name.split()[0] for name in names} == METHODS.keys() - {"local"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*said_of("one step"), *said_of("two steps"), *said_of("1 +")])
def test_a_method_runs_that_the_documentation_says_to_run(name: str) -> None:
    method = RUN[name] if name in RUN else METHODS[name]()
    task = Task(kinds.backbone("classification"), method.adapt)
    first = next(rounds(method, task, kinds.federation("classification", (9, 4)), PLAN))
    assert first.privacy is not None


@pytest.mark.slow
def test_processes_give_the_same_bits() -> None:
    plan = replace(PLAN, engine=EngineConfig("processes", processes=2))
    for one, other in zip(after(FedSDG()), after(FedSDG(), plan), strict=True):
        assert same_bits(one, other)


LOOKS = "uses examples beside the gradients of its steps"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ifca", LOOKS),
        ("apfl", LOOKS),
        ("fedala", LOOKS),
        ("fedem", LOOKS),
        ("feddpa", LOOKS),
        ("per-fedavg", "an example changes the gradients of others"),
        ("pfedme", "an example changes the gradients of others"),
        ("pfedgate", "an example changes the gradients of others"),
        ("fedmd", "an example changes the gradients of others"),
    ],
)
def test_a_method_that_learns_from_examples_in_another_way_is_refused(name: str, said: str) -> None:
    with pytest.raises(InputError, match=f"privacy.level = 'record'.*{said}"):
        after(METHODS[name]())


def test_normalisation_by_the_batch_is_refused() -> None:
    method = FedAvg()
    with pytest.raises(InputError, match=r"an example changes .*model\.batch_norm = 'frozen'"):
        next(rounds(method, Task(digits_backbone(), method.adapt), FEDERATION, PLAN))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cohort": CohortConfig(buffer=2)}, "cohort.buffer"),
        ({"local": LocalConfig(class_weights="balanced")}, "local.class_weights"),
    ],
)
def test_settings_that_break_the_account_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=f"{said} does not go with privacy.level = 'record'"):
        after(FedAvg(), replace(PLAN, **changes))


def test_the_level_alone_is_no_privacy() -> None:
    with pytest.raises(InputError, match="privacy has neither epsilon nor noise"):
        PrivacyConfig("record")
    with pytest.raises(InputError, match="the largest norm of an example's gradient"):
        PrivacyConfig("record", noise=1.0)
    with pytest.raises(InputError, match=r"privacy\.sampling = 'poisson' is for privacy\.level"):
        PrivacyConfig("record", noise=1.0, clip=1.0, sampling="poisson")


@pytest.mark.slow
def test_each_seed_is_checked_and_the_one_that_spends_the_most_is_announced() -> None:
    """Its smallest client may have fewer records."""
    privacy = PrivacyConfig("record", noise=0.7, clip=0.5)
    split = ft.SplitConfig(6, "dirichlet", alpha=0.3)
    experiment = replace(EXPERIMENT, split=split, seeds=(0, 1, 2, 3), privacy=privacy)
    inputs = Inputs.load(experiment, None, None)
    spent = {}
    for seed, federation in inputs.federations.items():
        account = experiment.plan.account(federation)
        assert account is not None
        spent[account.spent(3).epsilon] = seed
    seeds = spent[min(spent)], spent[max(spent)]
    assert min(spent) < max(spent)
    both = replace(experiment, seeds=seeds)
    assert f"epsilon {max(spent):.4g} at delta" in dry_run(both).privacy
    alone = replace(both, methods={"local": Local()})
    assert not dry_run(alone).privacy
    target = replace(privacy, epsilon=(min(spent) + max(spent)) / 2)
    with pytest.raises(InputError, match=r"noise = 0\.7 spends epsilon .* in 3 rounds"):
        dry_run(replace(both, privacy=target))
    dry_run(replace(alone, privacy=replace(target, stop="budget")))  # it spends nothing


@pytest.mark.slow
def test_a_run_says_what_it_spends_and_exports_what_was_trained_with_noise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds.write_table(tmp_path / "rows.jsonl", "classification")
    whole, halved, other = (tmp_path / name for name in ("whole", "halved", "other"))
    experiment = experiment_of(tmp_path, 20.0)
    ft.run(experiment, whole)
    shown = capsys.readouterr().err
    assert "of a record that is there or not (PLD, Poisson sampling)" in shown
    assert "-1.1, by the records of the client that has the most" in shown
    stop = {"summary": False, "scores": False}
    ft.run(experiment, halved, on_round=lambda done: ft.STOP if done.number == 1 else None, **stop)
    ft.run(experiment, halved, **stop)
    folders = [out / "methods/fedavg/seed-0" for out in (whole, halved)]
    logs = [(folder / "history.jsonl").read_bytes() for folder in folders]
    assert logs[0] == logs[1]
    lines = [json.loads(line) for line in logs[0].splitlines()]
    assert 19.8 < lines[-1]["epsilon"] <= 20.0
    assert lines[0]["epsilon"] < lines[1]["epsilon"] < lines[2]["epsilon"]
    text = " ".join(to_text(table([read(whole)])).split())
    assert f"epsilon {lines[-1]['epsilon']:.4g} at delta" in text
    assert "after round 3, of a record that is there or not (PLD, Poisson sampling)" in text

    states = [load_file(folder / "server.safetensors") for folder in folders]
    assert same_bits(*states)
    ft.run(experiment_of(tmp_path, 900.0), other)
    less = load_file(other / "methods/fedavg/seed-0/server.safetensors")
    assert not any(less[name].equal(value) for name, value in states[0].items())
    ft.export_model(whole, None, tmp_path / "out", which="last")
    adapter = load_file(tmp_path / "out/adapter_model.safetensors")
    scaling = json.loads((tmp_path / "out/adapter_config.json").read_text())["lora_alpha"] / 2
    trained = {name for name in states[0] if "lora_A" in name}
    assert len(trained) == len(adapter) / 2
    for name in trained:
        ours = [states[0][name.replace("lora_A", factor)] for factor in ("lora_B", "lora_A")]
        (short,) = (n for n in adapter if name.removesuffix(".default.weight") in n)
        theirs = [adapter[short.replace("lora_A", factor)] for factor in ("lora_B", "lora_A")]
        torch.testing.assert_close(scaling * theirs[0] @ theirs[1], 8.0 * ours[0] @ ours[1])


def experiment_of(folder: Path, epsilon: float) -> ft.Experiment:
    """Of three clients and a tiny transformer."""
    return ft.Experiment(
        {"fedavg": FedAvg(trainable="lora", rank=2)},
        rounds=3,
        data=ft.DataConfig(path=str(folder / "rows.jsonl"), task="classification", client="ward"),
        split=ft.SplitConfig(scheme="natural"),
        model=ft.ModelConfig(kinds.model("classification")),
        local=LocalConfig(batch_size=8),
        engine=EngineConfig("sequential"),
        privacy=PrivacyConfig("record", epsilon=epsilon, clip=1.0, secret=False),
    )
