"""Links that are still to come need no change outside their own file: here two of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from fedtailor import random
from fedtailor.engine import prepare
from fedtailor.engine import rounds as engine_rounds
from fedtailor.engine.config import CohortConfig, Plan
from fedtailor.methods.fedavg import FedAvg
from fedtailor.params import Params
from fedtailor.task.task import Task
from fedtailor.uploads.attacks import AttackConfig
from fedtailor.uploads.chain import Link, UploadContext
from fedtailor.uploads.norms import clip, update_norm
from fedtailor.uploads.rules import Robust
from tests.small import digits_backbone, digits_federation, last_round, same_bits

THREE = (9,) * 3
STEP, MODULUS = 2.0**-20, 2.0**32
UNBOUNDED = CohortConfig(above_norm="keep")


def with_link(monkeypatch: pytest.MonkeyPatch, link: Link) -> None:
    """Let every chain have ``link`` before all others, as `upload_chain` would list it."""
    known = prepare.upload_chain

    def chain(*settings):  # type: ignore[no-untyped-def]
        return replace(known(*settings), links=(link, *known(*settings).links))

    monkeypatch.setattr(prepare, "upload_chain", chain)
    monkeypatch.setattr(engine_rounds, "upload_chain", chain)


@dataclass(frozen=True)
class Masks(Link):
    """Each pair of clients agrees on a mask, which one adds and the other takes off."""

    seen: list[Params]

    def send(self, upload: Params, at: UploadContext) -> Params:
        (own,) = at.clients
        sent: Params = {}
        for name, value in upload.items():
            total = (value.double() / STEP).round()
            for other in range(len(THREE)):
                pair = min(own, other), max(own, other)
                mask = random.uniform(random.key(at.seed, at.round, name, *pair), value.shape)
                total += ((own < other) - (own > other)) * (mask.double() * MODULUS).round()
            sent[name] = total.remainder(MODULUS)
        return sent

    def receive(self, upload: Params, at: UploadContext) -> Params:
        self.seen.append(upload)
        return upload

    def total(self, uploads: Params, at: UploadContext) -> Params:
        like = at.state
        return {
            name: self._opened(mean, len(at.clients)).to(like[name].dtype)
            for name, mean in uploads.items()
        }

    def _opened(self, mean: torch.Tensor, members: int) -> torch.Tensor:
        whole = (mean * members).round().remainder(MODULUS)
        return torch.where(whole >= MODULUS / 2, whole - MODULUS, whole) * STEP / members


def test_masks_that_cancel_in_the_sum_are_one_link(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = last_round(FedAvg(), THREE, rounds=1, cohort=UNBOUNDED)[0]
    masks = Masks([])
    with_link(monkeypatch, masks)
    masked = last_round(FedAvg(), THREE, rounds=1, cohort=UNBOUNDED)[0]
    assert len(masks.seen) == 3
    for name, value in plain.server.items():
        torch.testing.assert_close(masked.server[name], value, atol=STEP, rtol=1e-6)
        assert max(float(one[name].max()) for one in masks.seen) > MODULUS / 4


@dataclass(frozen=True)
class Noise(Link):
    """Clips what a client changes, and adds noise to the aggregate."""

    norm: float
    scale: float

    def send(self, upload: Params, at: UploadContext) -> Params:
        upload = {name: value.clone() for name, value in upload.items()}
        length = update_norm(upload, at.unchanged(upload))
        clip(upload, at.unchanged(upload), min(1.0, self.norm / length))
        return upload

    def total(self, uploads: Params, at: UploadContext) -> Params:
        key = random.key(at.seed, at.round, "noise")
        return {
            name: value + self.scale * random.normal(random.fold_in(key, place), value.shape)
            for place, (name, value) in enumerate(uploads.items())
        }


def test_clipping_at_the_client_and_noise_on_the_aggregate_are_one_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The norms that the server measures are those after the clipping."""
    with_link(monkeypatch, Noise(0.01, 0.0))
    clipped = last_round(FedAvg(), THREE, rounds=1)[0]
    assert clipped.norms == pytest.approx((0.01,) * 3, rel=1e-4)
    monkeypatch.undo()
    with_link(monkeypatch, Noise(0.01, 0.1))
    noisy, again = (last_round(FedAvg(), THREE, rounds=1)[0] for _ in range(2))
    assert same_bits(noisy.server, again.server)
    added = noisy.server["hidden.weight"] - clipped.server["hidden.weight"]
    assert float(added.std()) == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize(
    ("robust", "settings", "needs"),
    [
        (Robust(), {}, "sums"),
        (Robust(), {"cohort": CohortConfig(above_norm="clip")}, "uploads"),
        (Robust(), {"attack": AttackConfig("mimic")}, "stack"),
        (Robust("median"), {}, "stack"),
    ],
)
def test_a_chain_needs_what_its_links_need(
    robust: Robust, settings: dict[str, Any], needs: str
) -> None:
    method, plan = FedAvg(robust=robust), Plan(rounds=1, **settings)
    task = Task(digits_backbone(), method.adapt)
    assert prepare.upload_chain(method, task, digits_federation(), plan).needs == needs
