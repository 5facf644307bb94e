"""Attacks on real runs: they find what is there, and nothing else."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedtailor as ft
from fedtailor.audit.audit import Plan as AuditPlan
from fedtailor.audit.audit import audit
from fedtailor.audit.canaries import audited, bound
from fedtailor.audit.inversion import _errors, _sent, by_inversion
from fedtailor.audit.likelihood import _dealt, _trained, by_likelihood
from fedtailor.audit.membership import Attacked, Rows, auc, found_rate
from fedtailor.cli import main
from fedtailor.engine.config import EngineConfig, Plan
from fedtailor.methods.fedavg import FedAvg
from fedtailor.optim import Optimiser
from fedtailor.params import flat
from fedtailor.runs.trained import open_trained
from fedtailor.task.backbone import Backbone
from fedtailor.task.task import Task
from fedtailor.uploads.accounting import PrivacyConfig
from fedtailor.uploads.secure.config import SecureAggregationConfig
from tests.cli.conftest import EXPERIMENT
from tests.small import digits, digits_federation

pytestmark = pytest.mark.slow

NO_TIME = ["--batches", "0", "--canaries", "0"]


class Net(nn.Module):
    """Linear, or with a wide layer that remembers a few rows."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        wide = [nn.Linear(64, hidden), nn.ReLU()] if hidden else []
        self.layers = nn.Sequential(nn.Flatten(), *wide, nn.Linear(hidden or 64, 10))

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(pixel_values)
        return logits


def backbone(hidden: int) -> Backbone:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Backbone(Net(hidden), head=("layers",), name=f"net {hidden}")


def finished(
    out: Path, hidden: int, optimiser: Optimiser, labels: Any = None, rounds: int = 4, **more: Any
) -> Path:
    """Two clients of FedAvg on digits, whose ``labels`` may be others."""
    data = digits()
    if labels is not None:
        data = replace(data, labels=labels, digest="random labels")
    experiment = ft.Experiment(
        {"fedavg": FedAvg(optimiser=optimiser)},
        rounds=rounds,
        split=ft.SplitConfig(2, scheme="iid", validation=0.25, test=0.25, max_examples=120),
        local=ft.LocalConfig(batch_size=8, epochs=8 if labels is not None else 1),
        evaluate=ft.EvaluateConfig(every=rounds),
        engine=EngineConfig("sequential"),
        **more,
    )
    options = {"summary": False, "scores": False}
    return ft.run(experiment, out, data=data, backbone=backbone(hidden), **options)


def test_a_model_that_memorises_is_told_from_one_that_has_not_learned(tmp_path: Path) -> None:
    """Random labels can only be remembered."""
    labels = np.random.default_rng(0).integers(0, 10, len(digits().inputs))
    given = {"data": replace(digits(), labels=labels, digest="random labels")}
    reached = {}
    for name, optimiser in (
        ("learned", Optimiser("adam", lr=3e-3)), ("not", Optimiser(lr=1e-8))
    ):  # fmt: skip
        run = finished(tmp_path / name, 128, optimiser, labels)
        trained = open_trained(run, None, which="last", backbone=backbone(128), **given)
        found = audit(trained, AuditPlan(batches=0, canaries=0))
        assert [one.target for one in found] == ["personal", "personal", "global", "global"]
        reached[name] = found[2]
    assert reached["learned"].low > 0.7  # type: ignore[operator]
    assert reached["not"].low < 0.5 < reached["not"].high  # type: ignore[operator]


def test_an_inversion_finds_the_row_of_a_linear_model(tmp_path: Path) -> None:
    run = finished(tmp_path / "run", 0, Optimiser(lr=0.1), rounds=1)
    trained = open_trained(run, None, data=digits(), backbone=backbone(0))
    (sent,) = _sent(trained, trained.federation, 1, 1)
    assert _errors(sent, sent.updates["upload"], trained.federation, 200).max() < 1e-3
    (found,) = by_inversion(trained, 1, 1, 50, math.inf)
    assert "of 1 batch of 1," in found.says
    assert (found.low, found.high) == (None, None)  # of one row


@pytest.mark.parametrize("by", ["server", "clients"])
def test_what_is_released_has_the_noise_of_the_run(by: Any, tmp_path: Path) -> None:
    """Whoever adds it: of 2 clients, the deviation is noise times clip / 2."""
    more: dict[str, Any] = {"privacy": PrivacyConfig(noise=2.0, clip=0.5, noise_by=by)}
    if by == "clients":
        more["secure_aggregation"] = SecureAggregationConfig(0.6)
    run = finished(tmp_path / "run", 0, Optimiser(lr=0.1), rounds=1, **more)
    trained = open_trained(run, None, data=digits(), backbone=backbone(0))
    (sent,) = _sent(trained, trained.federation, 1, 1)
    assert float(flat(sent.updates["release"]).std()) == pytest.approx(0.5, rel=0.1)
    assert ("upload" in sent.updates) == (by == "server")
    upload, _ = by_inversion(trained, 1, 1, 2, math.inf)
    assert (upload.says == "not tried: the server sees sums alone") == (by == "clients")


def test_a_line_says_which_attacks_are_tried(tmp_path: Path) -> None:
    more = {"privacy": PrivacyConfig(noise=2.0, clip=0.5)}
    run = finished(tmp_path / "run", 0, Optimiser(lr=0.1), rounds=1, **more)
    trained = open_trained(run, None, data=digits(), backbone=backbone(0))
    for canaries, says in ((2, "1 run without"), (3, "2 runs without")):
        said = list[str]()
        audit(trained, AuditPlan(batches=2, steps=2, canaries=canaries), said.append)
        assert said[1:] == [
            f"canaries: {says} training",
            "inversion: up to 2 batches, 2 steps each",
        ]


def test_members_have_taken_part_by_the_round_of_the_model(tmp_path: Path) -> None:
    cohort = ft.CohortConfig(size=1)
    run = finished(tmp_path / "run", 0, Optimiser(lr=0.1), rounds=6, cohort=cohort)
    trained = open_trained(run, None, data=digits(), backbone=backbone(0))
    history = (trained.folder / "history.jsonl").read_text()
    lines = [json.loads(line) for line in history.splitlines()]
    found = [{*Rows.of(trained, line["round"]).rows} for line in lines]
    assert found[0] == {*lines[0]["cohort"]}
    assert found[-1] == {0, 1}


def test_too_few_shadows_tell_nothing_apart(tmp_path: Path) -> None:
    cohort = ft.CohortConfig(size=1)
    run = finished(tmp_path / "run", 0, Optimiser(lr=0.1), rounds=1, cohort=cohort)
    trained = open_trained(run, None, data=digits(), backbone=backbone(0))
    found = by_likelihood(trained, Attacked.of(trained), 1, math.inf)
    assert [one.says.split(":")[0] for one in found] == ["not tried"] * 2


def test_shadows_tell_members_apart(tmp_path: Path) -> None:
    labels = np.random.default_rng(0).integers(0, 10, len(digits().inputs))
    given = {"data": replace(digits(), labels=labels, digest="random labels")}
    run = finished(tmp_path / "run", 16, Optimiser("adam", lr=3e-3), labels)
    trained = open_trained(run, None, which="last", backbone=backbone(16), **given)
    *_, shadows, _ = audit(trained, AuditPlan(shadows=8, batches=0, canaries=0))
    assert shadows.attack == "shadows"
    assert shadows.low > 0.55  # type: ignore[operator]
    with pytest.raises(ft.InputError, match="--shadows 2: each row must be both held out"):
        audit(trained, AuditPlan(shadows=2))


def test_a_shadow_knows_no_client_that_was_not_in_its_round(tmp_path: Path) -> None:
    cohort = ft.CohortConfig(size=1)
    run = finished(tmp_path / "run", 0, Optimiser(lr=0.1), rounds=1, cohort=cohort)
    trained = open_trained(run, None, data=digits(), backbone=backbone(0))
    models = Attacked.of(trained)
    assert len(models["global"].rows.rows) == 1  # the client that took part
    dealt = (_dealt(trained.federation, trained.seed, number) for number in range(8))
    shadows = [_trained(trained, federation, models)["global"] for federation in dealt]
    assert {bool(is_in.any()) for is_in, _ in shadows} == {True, False}


def test_the_bound_of_epsilon_is_below_the_claim_and_above_it_with_a_tenth_of_the_noise() -> None:
    """Through the rounds of the engine; the noise follows from the seed."""
    federation = digits_federation((2,) * 20)
    method, task = FedAvg(), Task(backbone(0), FedAvg().adapt)
    plan = Plan(
        rounds=2,
        engine=EngineConfig("sequential"),
        privacy=PrivacyConfig(epsilon=1.0, delta=1e-6, clip=0.5),
    )
    account = plan.account(federation)
    assert account is not None
    claimed = account.spent(2).epsilon

    def found(noise: float) -> float:
        cut = replace(plan, privacy=PrivacyConfig(noise=noise, delta=1e-6, clip=0.5))
        made = audited(method, task, federation, cut, 10, 1e-6, math.inf)
        assert made is not None
        return made.epsilon

    assert 0 <= found(account.noise) < claimed < 1.5 * claimed < found(account.noise / 10)


def test_measures_and_bound_of_cases_that_are_known() -> None:
    others = np.arange(200.0)
    assert auc(others + 0.5, others) == pytest.approx(0.5 + 1 / 400)
    assert found_rate(np.array([197.0, 197.5, 198.5]), others) == pytest.approx(2 / 3)
    coins = np.random.default_rng(0).random(1000) < 0.5
    assert bound(np.random.default_rng(1).random(1000), coins, 0.0).epsilon < 0.2


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "small.toml").write_text(EXPERIMENT)
    run = str(tmp_path / "run")
    command = ["audit", run, "--method", "fedsdg", *NO_TIME]
    assert main(["run", str(tmp_path / "small.toml"), "--out", run]) == 0
    capsys.readouterr()
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["target"], one["measure"], one["chance"]) for one in found] == [
        ("personal", "AUC", 0.5), ("personal", "rate at 1 %", 0.01),
        ("global", "AUC", 0.5), ("global", "rate at 1 %", 0.01),
    ]  # fmt: skip
    assert all(one["low"] <= one["value"] <= one["high"] for one in found)
    assert main(["audit", run, "--method", "local"]) == 0
    told = capsys.readouterr()
    assert "not tried: nothing is sent" in told.out
    assert "canaries" not in told.err
    assert "inversion" not in told.err
    assert main([*command[:4], "--batches", "1", "--steps", "1"]) == 0
    told = capsys.readouterr()
    assert "canaries" not in told.err
    assert "inversion: up to 1 batch, 1 step each\n" in told.err
    for wrong, said in (
        (["--minutes", "-1"], "--minutes -1; allowed: 0 to"),
        (["--shadows", "1"], "--shadows 1: each row must be both held out"),
    ):
        assert main([*command, *wrong]) == 2
        assert said in capsys.readouterr().err


def test_a_damaged_global_model_is_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is of an earlier round than the personal models, in a file of its own."""
    (tmp_path / "small.toml").write_text(EXPERIMENT)
    run = tmp_path / "run"
    settings = ("rounds=8", 'methods=["fedsdg"]', "methods.fedsdg.optimiser.lr=0.03")
    changed = [part for one in settings for part in ("--set", one)]
    assert main(["run", str(tmp_path / "small.toml"), "--out", str(run), *changed]) == 0
    commit = json.loads((run / "methods/fedsdg/seed-0/commit.json").read_text())
    best = {model: one["round"] for model, one in commit["best"].items()}
    assert best["global"] < best["personal"]
    file = run / f"methods/fedsdg/seed-0/round-{best['global']:06d}.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 0xFF
    file.write_bytes(content)
    for command in (["audit"], ["export", "--out", str(tmp_path / "model")]):
        capsys.readouterr()
        assert main([command[0], str(run), *command[1:]]) == 2
        told = capsys.readouterr().err
        assert f"{file.name} is damaged: its checksum does not match" in told.splitlines()[-1]
