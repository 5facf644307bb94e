"""A clip that follows a quantile of norms: what is sent, noised and moved, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor import random
from fedtailor.engine.config import CohortConfig, EngineConfig, Plan
from fedtailor.engine.rounds import rounds
from fedtailor.errors import InputError
from fedtailor.methods.fedavg import FedAvg
from fedtailor.report.comparison import to_text
from fedtailor.report.table import table
from fedtailor.store.read import read
from fedtailor.task.task import Task
from fedtailor.uploads.accounting import PrivacyConfig, account
from fedtailor.uploads.private import WITHIN, Private
from fedtailor.uploads.secure.config import SecureAggregationConfig
from tests.engine.test_privacy import EXPERIMENT, PLAN, backbone, server_after
from tests.small import digits_federation
from tests.uploads.test_private import AT, SERVER, moved

MOVING = PrivacyConfig(noise=0.8, clip=0.01, clip_quantile=0.5)


def test_a_bit_tells_whether_an_update_is_within_the_clip_and_moves_it() -> None:
    """Three clients of four that are usual; one upload is long, and one is a lie."""
    link = Private(0.5, 1.2, 4, "fedavg", quantile=0.6, count_noise=1.5)
    half = 1.2 * 0.5 / (2 * 1.5)  # so that one noise serves both
    sent = [link.send(moved(by), AT) for by in (1e-4, -1e-4, 3.0)]
    assert [float(one[WITHIN]) for one in sent] == pytest.approx([half, half, -half])
    sent[0][WITHIN] = torch.tensor(100.0)
    there = [link.receive(one, AT) for one in sent]
    assert [float(one[WITHIN]) for one in there] == [
        float(one[WITHIN]) for one in (sent[1], *sent[1:])
    ]
    at = replace(AT, clients=(2, 5, 6))
    made = link.total({n: torch.stack([one[n] for one in there]) for n in there[0]}, at)
    assert made.keys() == SERVER.keys()

    draws = random.generator(7, 3, "privacy", "fedavg")
    std = 1.2 * 0.5 / 4
    for name in ("a", "b"):
        mean = torch.stack([one[name] for one in there]).double().sum(0) / 4
        noise = std * torch.from_numpy(draws.standard_normal(SERVER[name].shape))
        assert torch.allclose(made[name][0].double(), SERVER[name] + mean + noise, atol=1e-6)
    share = 0.5 + (1 / 2 + 1 / 2 - 1 / 2 + 1.5 * draws.standard_normal()) / 4
    assert link.close(at.clients) == ()
    assert link.clip_now == pytest.approx(0.5 * math.exp(-0.2 * (share - 0.6)), rel=1e-6)
    assert link.close(()) == ()  # a round without uploads moves nothing
    assert float(link.send(moved(0.0), AT)[WITHIN]) == pytest.approx(half * link.clip / 0.5)
    elsewhere = Private(0.5, 1.2, 4, "fedavg", quantile=0.6, count_noise=1.5)
    told = replace(AT, clip=link.clip)
    assert elsewhere.send(moved(1.0), told)["a"].equal(link.send(moved(1.0), AT)["a"])


@pytest.mark.parametrize("neighbours", ["replace", "remove"])
@pytest.mark.parametrize("cohort", [5, 100])
def test_update_and_bit_together_cost_what_the_update_alone_does(
    neighbours: Any, cohort: int
) -> None:
    plain = replace(MOVING, clip_quantile=None, neighbours=neighbours)
    made = account(replace(MOVING, neighbours=neighbours), 200, cohort, 10)
    assert made == account(plain, 200, cohort, 10)
    # the largest change of (sum of updates, sum of what stands for bits), by its own noise
    link = Private(0.3, made.update_noise, cohort, "fedavg", 0.5, made.count_noise)
    within, over = (link.receive(link.send(moved(by), AT), AT) for by in (0.0, 9.0))
    times = 2 if neighbours == "replace" else 1
    update, bit = 0.3 * times, abs(float(over[WITHIN]))
    bit = float(within[WITHIN] - over[WITHIN]) if neighbours == "replace" else bit
    noise = made.update_noise * 0.3
    assert noise / math.hypot(update, bit) == pytest.approx(made.noise / times, rel=1e-6)
    assert made.count_noise == max(cohort / 20, 0.8)
    assert made.update_noise < 1.16 * made.noise


@pytest.mark.slow
def test_the_clip_moves_to_the_median_norm_and_masks_change_nothing() -> None:
    federation = digits_federation((4, 5, 6, 7, 8), seed=1)
    method = FedAvg(optimiser=ft.Optimiser(lr=1e-3))
    privacy = PrivacyConfig(noise=0.01, clip=0.0015, clip_quantile=0.5)
    plan = Plan(
        7, local=ft.LocalConfig(8, steps=1), engine=EngineConfig("sequential"), privacy=privacy,
        evaluate=ft.EvaluateConfig(every=7, clients=1, global_model=False),
    )  # fmt: skip
    done = list(rounds(method, Task(backbone(), method.adapt), federation, plan))
    for before, after in pairwise(done):
        assert after.clip == before.next_clip
    free = replace(plan, privacy=PrivacyConfig(), rounds=1, cohort=CohortConfig(above_norm="clip"))
    (plain,) = rounds(method, Task(backbone(), method.adapt), federation, free)
    assert done[0].clip == 0.0015
    assert done[-1].clip == pytest.approx(np.median(plain.norms), rel=0.1)

    secure = replace(plan, rounds=2, secure_aggregation=SecureAggregationConfig(0.51))
    masked = list(rounds(method, Task(backbone(), method.adapt), federation, secure))
    assert [one.clip for one in masked] == pytest.approx([one.clip for one in done[:2]], rel=1e-4)


@pytest.mark.slow
def test_a_run_goes_on_with_its_clip(tmp_path: Path) -> None:
    privacy = replace(EXPERIMENT.privacy, clip_quantile=0.3, neighbours="remove")
    experiment = replace(EXPERIMENT, methods={"fedavg": FedAvg()}, privacy=privacy)
    whole, halved = tmp_path / "whole", tmp_path / "halved"
    quiet: dict[str, Any] = {"summary": False, "scores": False}
    ft.run(experiment, whole, **quiet)
    ft.run(experiment, halved, on_round=lambda one: ft.STOP if one.number == 2 else None, **quiet)
    ft.run(experiment, halved, **quiet)
    logs = [out / "methods/fedavg/seed-0/history.jsonl" for out in (whole, halved)]
    assert logs[0].read_bytes() == logs[1].read_bytes()
    lines = [json.loads(line) for line in logs[0].read_text().splitlines()]
    assert lines[0]["clip"] == 0.5
    assert len({line["clip"] for line in lines}) == 3
    said = " ".join(to_text(table([read(whole)])).split())
    last = f"updates are clipped to {lines[-1]['next_clip']:.3g} now"
    assert f"of a client whose data are left out ({lines[-1]['accountant']}); {last}" in said
    for path in whole.glob("methods/fedavg/**/*.safetensors"):
        assert path.read_bytes() == (halved / path.relative_to(whole)).read_bytes()


def test_what_has_no_effect_is_refused() -> None:
    with pytest.raises(InputError, match="privacy has neither epsilon nor noise"):
        PrivacyConfig(clip_quantile=0.5)
    refused: list[dict[str, Any]] = [{"level": "record"}, {"noise_by": "clients"}]
    for more in refused:
        ((name, value),) = more.items()
        said = rf"clip_quantile = 0\.5 does not go with privacy\.{name} = {value!r}"
        with pytest.raises(InputError, match=said):
            PrivacyConfig(noise=1.0, clip=0.1, clip_quantile=0.5, **more)
    secure = SecureAggregationConfig(0.51, range=0.001)
    with pytest.raises(InputError, match=r"range = 0\.001 is less than privacy\.clip = 0\.01"):
        server_after(FedAvg(), replace(PLAN, privacy=MOVING, secure_aggregation=secure))
