"""Adapters as PEFT reads them, where the common case doesn't show it."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor, nn

from fedtailor.export.network import Network, write_adapter
from fedtailor.methods.flora import FLoRA
from fedtailor.models import ModelConfig
from fedtailor.random import key
from fedtailor.task.backbone import Backbone
from fedtailor.task.task import Task


class Narrowing(nn.Module):
    """Two layers, of which a full-rank update has 6 and 3 components."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 6)
        self.small = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.small(torch.relu(self.wide(x)))
        return y


def backbone() -> Backbone:
    torch.manual_seed(0)
    return Backbone(Narrowing(), blocks=(("wide", "small"),))


def test_projections_of_different_ranks_load_in_peft(tmp_path: Path) -> None:
    method = FLoRA(rank=2)
    task = Task(backbone(), method.adapt)
    server = {n: torch.randn_like(v) for n, v in method.init_server(task, 2, key(0)).items()}
    network = Network(task.original, ModelConfig(factory="net.py:net"), {"task": "classification"})
    write_adapter(network, method.portable(task, server).lora, {}, tmp_path, None)
    peft = PeftModel.from_pretrained(backbone().model, str(tmp_path)).eval()
    x = torch.rand(4, 8)
    torch.testing.assert_close(peft(x), method.predict(task, server, {"x": x}))
