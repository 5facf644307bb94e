"""Frozen weights in bfloat16: half the bytes, and trained ones that stay exact."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch.func import grad_and_value, vmap

from fedtailor import random
from fedtailor.method import Method
from fedtailor.methods import FedAvg, FedHFT, FedSDG
from fedtailor.models import ModelConfig
from fedtailor.models import load_model as load
from fedtailor.params import Batch, Params
from fedtailor.task.task import Task
from tests.models.small import (
    CAUSAL,
    DECODERS,
    ENCODERS,
    ROTARY,
    SEQUENCE,
    save,
    texts,
    three_classes,
)
from tests.small import same_bits

METHODS = {
    "lora": FedAvg(trainable="lora", rank=2),
    "full": FedAvg(),
    "fedsdg": FedSDG(rank=2),
    "fedhft": FedHFT(rank=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("label", METHODS)
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_what_is_trained_is_float32_and_the_rest_half_as_large(
    tmp_path: Path, name: str, label: str
) -> None:
    method: Method = METHODS[label]
    is_lm = name == "llama"
    config = DECODERS[name] if is_lm else three_classes(ENCODERS[name])
    folder = save(tmp_path, config, CAUSAL if is_lm else SEQUENCE)
    kind, found = "causal-lm" if is_lm else "classification", {}
    batches = texts(clients=2)
    if is_lm:
        del batches["labels"]
    state: Params = {}
    for dtype in ("fp32", "bf16"):
        model = ModelConfig(str(folder))
        backbone = load(replace(model, dtype=dtype), kind, 3, seed=0)  # type: ignore[arg-type]
        task = Task(backbone, method.adapt)
        trained = {task.state[tensor].dtype for tensor in task.trained}
        frozen = {p.dtype for n, p in task.model.named_parameters() if n not in task.trained}
        assert trained == {torch.float32}
        assert frozen <= {torch.float32 if dtype == "fp32" else torch.bfloat16}
        state = state or {n: v + 0.01 * torch.randn_like(v) for n, v in task.state.items()}

        def loss(state: Params, batch: Batch, task: Task = task) -> torch.Tensor:
            return task.loss(state, batch, random.key(0))[0]

        gradient, value = vmap(grad_and_value(loss), in_dims=(None, 0))(state, batches)
        assert all(one.dtype == torch.float32 for one in gradient.values())
        found[dtype] = value
    torch.testing.assert_close(found["bf16"], found["fp32"], atol=0.05, rtol=0.05)


@pytest.mark.parametrize("name", ["llama", "gemma", "bert"])  # one with a scale, one without a head
def test_weights_stored_so_are_mapped_from_their_file(tmp_path: Path, name: str) -> None:
    config = {**DECODERS, **ROTARY, **ENCODERS}[name]
    is_lm = name not in ENCODERS
    auto = CAUSAL if is_lm else "AutoModel"
    folder, kind = save(tmp_path, config, auto), getattr(transformers, auto)
    found = []
    for dtype in (torch.float32, torch.bfloat16):  # the same numbers
        stored = tmp_path / f"{name}-{dtype}"
        shutil.copytree(folder, stored)
        kind.from_pretrained(folder, dtype=torch.bfloat16).to(dtype).save_pretrained(stored)
        task = "causal-lm" if is_lm else "classification"
        found.append(load(ModelConfig(str(stored), dtype="bf16"), task, 3, seed=0).model)
    one, other = ({**m.state_dict(), **dict(m.named_buffers())} for m in found)
    assert same_bits(one, other)
    assert all(b.dtype == torch.float32 for b in found[1].buffers() if b.is_floating_point())
    maps = Path("/proc/self/maps").read_text().splitlines()
    lines = [line for line in maps if str(stored) in line]
    places = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
    of = "0.self_attn.q_proj.weight" if is_lm else "0.attention.self.value.weight"
    (weight,) = (value for name, value in found[1].named_parameters() if name.endswith(of))
    mapped = any(start <= weight.data_ptr() < end for start, end in places)
    assert mapped == (name == "llama")
