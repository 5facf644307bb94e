"""rsLoRA, dropout of LoRA's inputs and DoRA, in every method that adds LoRA."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor

import fedtailor as ft
from fedtailor.errors import InputError
from fedtailor.export.network import Network, write_adapter
from fedtailor.layers.lora import with_lora
from fedtailor.method import FineTuning, Method
from fedtailor.methods import METHODS
from fedtailor.models import ModelConfig
from fedtailor.params import Params
from fedtailor.random import key
from fedtailor.task.backbone import LoRAOptions
from fedtailor.task.task import Task
from fedtailor.testing import subjects
from tests.export.test_network import backbone as narrow
from tests.flower.grid import experiment


def made(name: str, **fields: Any) -> Method:
    adds = {"trainable": "lora"} if issubclass(METHODS[name], FineTuning) else {}
    return METHODS[name](**{**adds, **fields})


def task_of(method: Method, **options: Any) -> Task:
    backbone = subjects.small_bert(3, 50, dropout=0.0)
    return Task(replace(backbone, lora=LoRAOptions(**options)), method.adapt)


ADAPTERS = [name for name, method in METHODS.items() if "rank" in method.__dataclass_fields__]
OWN = [name for name in ADAPTERS if not issubclass(METHODS[name], FineTuning)]
COMMON = ["fedavg", "pfedmoe"]  # with the LoRA of all the others, and with two models


def moved(task: Task) -> Params:
    torch.manual_seed(1)
    return {n: v + 0.1 * torch.randn(v.shape).to(v) for n, v in task.state.items()}


def batch() -> Params:
    ids = torch.arange(12).view(2, 6)
    return {
        "input_ids": ids, "attention_mask": torch.ones(2, 6), "labels": torch.tensor([0, 2]),
        "weight": torch.ones(2),
    }  # fmt: skip


@pytest.mark.parametrize("name", [*COMMON, *OWN])
def test_every_lora_has_the_options(name: str) -> None:
    plain, louder = made(name, rank=4), made(name, rank=4, lora_alpha=32.0)  # 16 / 2 = 32 / 4
    tasks = [task_of(louder), task_of(plain, rslora=True), task_of(plain, dropout=0.5)]
    state = moved(tasks[0])
    one, two, dropped = (task.logits(state, batch()) for task in tasks)
    torch.testing.assert_close(one, two)
    assert not torch.allclose(dropped, two)  # of the other scaling
    losses = [tasks[2].loss(state, batch(), key(seed))[0] for seed in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2]
    assert tasks[0].loss(state, batch(), key(0))[0] == tasks[0].loss(state, batch(), key(1))[0]


DORA = "its LoRA has no form with DoRA; leave model.lora.dora out"


@pytest.mark.parametrize("name", OWN)
def test_dora_is_refused_where_the_factors_are_all(name: str) -> None:
    with pytest.raises(InputError, match=DORA):
        task_of(made(name), dora=True)


@pytest.mark.parametrize("name", COMMON)
def test_dora_starts_at_the_base_model(name: str) -> None:
    method = made(name, rank=4)
    task, plain = task_of(method, dora=True), task_of(method)
    torch.testing.assert_close(task.logits(task.state, batch()), plain.logits(plain.state, batch()))
    assert sum(n.endswith("lora_magnitude_vector.default.weight") for n in task.trained) >= 4


def test_options_without_lora_are_refused(tmp_path: Path) -> None:
    model = {"name": "cnn", "pretrained": False, "image_size": 16, "lora": {"rslora": True}}
    chosen = experiment("fedavg", data={"name": "digits"}, model=model)
    with pytest.raises(InputError, match=r"^model.lora.rslora = true has no effect: no method"):
        ft.run(chosen, tmp_path)


def test_dora_loads_in_peft(tmp_path: Path) -> None:
    method = ft.FedAvg(trainable="lora", rank=2)
    task = Task(replace(narrow(), lora=LoRAOptions(dora=True)), method.adapt)
    state = moved(task)
    portable = method.portable(task, state)
    network = Network(task.original, ModelConfig(factory="net.py:net"), {"task": "classification"})
    write_adapter(network, portable.lora, portable.magnitudes, tmp_path, None)
    x = torch.rand(4, 8)
    want = method.predict(task, state, {"x": x})
    peft = PeftModel.from_pretrained(narrow().model, str(tmp_path)).eval()
    torch.testing.assert_close(peft(x), want)
    model: Any = narrow().model
    for path, (A, B) in portable.lora.items():
        layer: Any = model.get_submodule(path)
        W: Tensor = with_lora(layer.weight.detach(), A, B, portable.magnitudes[path])
        layer.weight.data = W
    torch.testing.assert_close(model(x), want)
