"""Links that are still to come need no change outside their own file: here one of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

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


def with_link(monkeypatch: pytest.MonkeyPatch, link: Link) -> None:
    """Let every chain have ``link`` before all others, as `upload_chain` would list it."""
    known = prepare.upload_chain

    def chain(*settings):  # type: ignore[no-untyped-def]
        return replace(known(*settings), links=(link, *known(*settings).links))

    monkeypatch.setattr(prepare, "upload_chain", chain)
    monkeypatch.setattr(engine_rounds, "upload_chain", chain)


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
