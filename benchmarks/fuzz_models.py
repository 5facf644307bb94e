"""Mutated model folders: tiny models of four architectures, of which one file is changed."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

from .mutations import Attempt, Change, mutated, read

_WORDS = ["[PAD]", "[UNK]", "[END]", "the", "price", "of", "oil", "rose"]
_SHAPE: dict[str, Any] = {
    "vocab_size": len(_WORDS), "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 16, "max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


def model_folders(folder: Path) -> Attempt:
    """Load models of mutated folders, and predict with them."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    from fedtailor.data.tokens import encode
    from fedtailor.models import ModelConfig, load_model
    from fedtailor.models.source import faults_of_files
    from fedtailor.params import Batch
    from fedtailor.runs.build import check_ids

    os.environ["HF_HUB_OFFLINE"] = "1"
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(_WORDS)}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", eos_token="[END]", unk_token="[UNK]"
    )
    kinds: dict[str, tuple[Any, str]] = {
        "bert": (transformers.BertConfig(**_SHAPE), "AutoModelForSequenceClassification"),
        "gpt2": (transformers.GPT2Config(
            vocab_size=len(_WORDS), n_embd=8, n_layer=2, n_head=2, n_positions=16,
            bos_token_id=1, eos_token_id=2), "AutoModelForCausalLM"),
        "llama": (transformers.LlamaConfig(**_SHAPE), "AutoModelForCausalLM"),
        "vit": (transformers.ViTConfig(
            hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
            image_size=8, patch_size=4), "AutoModelForImageClassification"),
    }  # fmt: skip
    files = []
    for name, (config, auto) in kinds.items():
        out = folder / name
        getattr(transformers, auto).from_config(config).save_pretrained(str(out))
        if name == "vit":
            (out / "preprocessor_config.json").write_text(
                json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3})
            )
        else:
            tokenizer.save_pretrained(str(out))
        files += [p for p in sorted(out.iterdir()) if p.suffix in (".json", ".safetensors")]

    def load(path: Path) -> None:
        name = path.parent.name
        is_lm = name in ("gpt2", "llama")
        modality: Any = "image" if name == "vit" else "text"
        kind: Any = "causal-lm" if is_lm else "classification"
        model = load_model(ModelConfig(str(path.parent)), kind, 2, 0, modality)
        if name == "vit":
            batch: Batch = {"pixel_values": torch.rand(2, 3, 8, 8)}
        else:
            if model.tokenizer is None:
                return
            texts = ["the price of oil rose", "oil"]
            tokens = encode(texts, model.tokenizer, 16, model.objective)
            check_ids(tokens, model)
            batch = tokens.batch(torch.arange(2).numpy())
        with faults_of_files("the model fails on these data"), torch.no_grad():  # as a run does
            logits = model.logits(model.model(**model.prepare(batch)))
        if logits.shape[0] != 2 or (not is_lm and logits.shape[1] != 2):
            raise AssertionError(f"logits {list(logits.shape)}")

    def attempt(rng: random.Random) -> Change:
        path = rng.choice(files)
        before = path.read_bytes()
        content, change = mutated(rng, before, path.suffix)
        path.write_bytes(content)
        try:
            read(lambda: load(path))
        finally:
            path.write_bytes(before)
        return Change(f"{path.parent.name}/{path.name} {change.place}", change.types)

    return attempt
