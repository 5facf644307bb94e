"""A round of LoRA on every architecture: clients together get the numbers that each gets alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fedtailor as ft
from fedtailor.models import ModelConfig, load_model
from fedtailor.testing import subjects
from tests.models.small import (
    CAUSAL,
    DECODERS,
    ENCODERS,
    IMAGE,
    PICTURES,
    ROTARY,
    SEQUENCE,
    save,
)

CASES = [
    *((name, "classification", SEQUENCE) for name in (*ENCODERS, *DECODERS, *ROTARY)),
    *((name, "causal-lm", CAUSAL) for name in (*DECODERS, *ROTARY)),
    *((name, "classification", IMAGE) for name in PICTURES),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of vmap, by Swin's pooling
@pytest.mark.parametrize(("name", "kind", "auto"), CASES)
def test_a_round_of_lora(tmp_path: Path, name: str, kind: str, auto: str) -> None:
    folder = save(tmp_path, {**ENCODERS, **DECODERS, **ROTARY, **PICTURES}[name], auto)
    subject = subjects.pictures() if auto == IMAGE else subjects.texts()
    federation = subject.federation
    if kind == "causal-lm":
        dataset = replace(federation.dataset, task=kind, labels=None, classes=())
        federation = replace(federation, dataset=dataset, public=None)
    config = ModelConfig(str(folder), pretrained=False)
    backbone = load_model(config, kind, 6, 0, "image" if auto == IMAGE else "text")
    method = ft.FedSDG(rank=2)
    servers = []
    for executor in ("sequential", "vectorised"):
        engine = ft.EngineConfig(executor, clients_per_step=3)  # type: ignore[arg-type]
        plan = replace(subject.plan, rounds=1, evaluate=ft.EvaluateConfig(), engine=engine)
        task = ft.Task(backbone, method.adapt)
        *_, done = ft.rounds(method, task, federation, plan)
        servers.append(done.server)
    for key, value in servers[0].items():
        torch.testing.assert_close(servers[1][key], value, atol=2e-5, rtol=1e-4)
    assert any(value.any() for key, value in servers[0].items() if key.endswith(".B"))
