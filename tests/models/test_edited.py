"""Models whose files do not fit together are refused in one line."""

from __future__ import annotations

import csv
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

import fedtailor as ft
from fedtailor.errors import InputError
from fedtailor.export.folder import export_model
from fedtailor.models import load_model
from fedtailor.models.packages import quiet
from fedtailor.runs.experiment import parse
from fedtailor.runs.trained import open_trained
from tests.exported import exported

from .small import CAUSAL, DECODERS, save

WORDS = ["[END]", *(f"w{number}" for number in range(1, 20)), "<patient>"]


def folder_of(path: Path, rows: int, **fields: Any) -> Path:
    """A tiny Llama with ``rows`` embeddings, and a tokenizer of 21 tokens."""
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[END]")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    content = {**DECODERS["llama"].to_dict(), "vocab_size": rows, **fields}
    out = save(path, transformers.LlamaConfig.from_dict(content), CAUSAL)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="[END]").save_pretrained(out)
    return out


def experiment(tmp_path: Path, model: Path, texts: list[str], **fields: Any) -> ft.Experiment:
    with (tmp_path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("text", "ward"), *((t, w) for t in texts for w in "ab")])
    return parse({
        "rounds": 1,
        "methods": {"fedavg": {"trainable": "lora", "optimiser": {"name": "adam", "lr": 0.1}}},
        "data": {"path": str(tmp_path / "a.csv"), "client": "ward", "task": "causal-lm"},
        "split": {"scheme": "natural", "min_examples": 1},
        "model": {"name": str(model), **fields},
    })  # fmt: skip


@pytest.mark.slow
def test_tokens_beyond_the_embeddings_are_refused(tmp_path: Path) -> None:
    model = folder_of(tmp_path / "llama", rows=20)
    told = "the tokenizer has ids up to 20, the embedding table of .* has 20 rows, for ids 0 to 19"
    beyond = experiment(tmp_path, model, ["w1 <patient> w2"] * 6)
    with pytest.raises(InputError, match=told):
        ft.run(beyond, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    within = experiment(tmp_path, model, ["w1 w2"] * 6)  # a token that no text has does no harm
    run = ft.run(within, tmp_path / "run")
    personal = ft.load_model(run, "fedavg", "a")
    with pytest.raises(InputError, match=told):
        personal.predict(["w1 <patient>"])
    (tmp_path / "new.csv").write_text("text\n" + "w1 <patient> w3\n" * 6)
    with pytest.raises(InputError, match=told):
        ft.onboard(run, "fedavg", tmp_path / "new.csv", "c")
    out = export_model(run, "fedavg", tmp_path / "out", client="a")
    with quiet(), pytest.raises(OSError, match="it has the token 20, and the model knows 0 to 19"):
        exported(out).answer("w1 <patient>")


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_on_the_output_layer_is_merged(tied: bool, tmp_path: Path) -> None:
    model = folder_of(tmp_path / "llama", rows=21, tie_word_embeddings=tied)
    of = experiment(tmp_path, model, ["w1 w2 w3"] * 6, targets=["lm_head", "*.down_proj"])
    run = ft.run(of, tmp_path / "run")
    trained = open_trained(run, "fedavg")
    state = trained.client_state("a")
    assert any("lm_head" in name for name in state)
    out = export_model(run, "fedavg", tmp_path / "out", client="a", merge=True)
    with quiet():  # an exported model switches progress bars off for good
        merged = exported(out)
    ids = torch.tensor([[1, 2, 3, 4]])
    ours = {"input_ids": ids, "attention_mask": torch.ones(1, 4)}
    with torch.no_grad():
        expected = trained.method.predict(trained.task, state, ours)
        plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")(ids).logits
    np.testing.assert_allclose(merged.logits(ours).numpy(), expected.numpy(), atol=1e-5)
    np.testing.assert_allclose(plain.numpy(), expected.numpy(), atol=1e-5)


def test_dropout_without_effect_is_refused(tmp_path: Path) -> None:
    model = folder_of(tmp_path / "llama", rows=21)
    config = ft.ModelConfig(str(model), dropout=0.3)
    with pytest.raises(InputError, match=r"model.dropout = 0.3 has no effect: LlamaForCausalLM"):
        load_model(config, "causal-lm", 0, seed=0)
    load_model(config, "classification", 3, seed=0)  # the head has one


EDITS: list[tuple[str, Any]] = [
    ("num_attention_heads", 0), ("num_attention_heads", "two"), ("hidden_act", "nothing"),
    ("hidden_size", "16"), ("hidden_size", 24), ("hidden_size", -16), ("num_hidden_layers", -1),
    ("num_hidden_layers", 10**6), ("num_hidden_layers", "2"), ("num_hidden_layers", 1),
    ("num_hidden_layers", 3), ("vocab_size", 10**12), ("vocab_size", None),
    ("intermediate_size", 10**10), ("model_type", "none"), ("model_type", 3),
    ("rope_parameters", {"rope_type": "none"}), ("quantization_config", {"quant_method": "gptq"}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), EDITS)
def test_an_edited_config_is_refused_in_one_line(field: str, value: Any, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "llama", rows=21)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, field: value}))
    begun = time.process_time()
    with pytest.raises(InputError) as refused:
        load_model(ft.ModelConfig(str(folder)), "causal-lm", 0, seed=0)
    assert "\n" not in str(refused.value)
    assert time.process_time() - begun < 2


def test_what_the_libraries_say_of_a_field_is_said_whole(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "llama", rows=21, chunk_size_feed_forward=3)
    load_model(ft.ModelConfig(str(folder)), "causal-lm", 0, seed=0)  # of no effect
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "hidden_size": 16.5}))
    with pytest.raises(InputError, match=r"field 'hidden_size': .*expected int, got float"):
        load_model(ft.ModelConfig(str(folder)), "causal-lm", 0, seed=0)


def test_weights_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "llama", rows=21)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = torch.inf
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=r"weights that are not finite, 'model\.norm\.weight'"):
        load_model(ft.ModelConfig(str(folder)), "causal-lm", 0, seed=0)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
@pytest.mark.parametrize("content", [b"", b"garbage", b"{}", b"[1]", None])
def test_a_damaged_file_is_refused_in_one_line(
    name: str, content: bytes | None, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path / "llama", rows=21)
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(InputError) as refused:
        load_model(ft.ModelConfig(str(folder)), "causal-lm", 0, seed=0)
    assert "\n" not in str(refused.value)
