"""Tiny models of every architecture, with random weights, saved as Hugging Face saves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.func import functional_call, grad, vmap

from fedtailor.models import ModelConfig
from fedtailor.models import load_model as load
from fedtailor.models.packages import quiet
from fedtailor.task.backbone import Backbone

VOCABULARY, LAYERS, WIDTH = 60, 2, 16

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 40,
}
_DECODER = {**_SHAPE, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0,
            "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip

ENCODERS: dict[str, Any] = {
    "bert": transformers.BertConfig(**_SHAPE),
    "roberta": transformers.RobertaConfig(**_SHAPE, type_vocab_size=1),
    "xlm-roberta": transformers.XLMRobertaConfig(**_SHAPE, type_vocab_size=1),
    "distilbert": transformers.DistilBertConfig(
        vocab_size=VOCABULARY, dim=WIDTH, n_layers=LAYERS, n_heads=2, hidden_dim=32,
        max_position_embeddings=40,
    ),
    "electra": transformers.ElectraConfig(**_SHAPE, embedding_size=8),
    "mpnet": transformers.MPNetConfig(**_SHAPE),
    "deberta-v2": transformers.DebertaV2Config(  # as DeBERTa-v3 has it
        **_SHAPE, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8,
        share_att_key=True, norm_rel_ebd="layer_norm", position_biased_input=False,
        type_vocab_size=0,
    ),
    "modernbert": transformers.ModernBertConfig(
        **_SHAPE, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
        local_attention=4, global_attn_every_n_layers=2, classifier_pooling="mean",
    ),
}  # fmt: skip
DECODERS: dict[str, Any] = {
    "gpt2": transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=LAYERS, n_head=2, n_positions=40,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    ),
    "llama": transformers.LlamaConfig(**_DECODER),
    "mistral": transformers.MistralConfig(**_DECODER, sliding_window=4),
    "qwen2": transformers.Qwen2Config(
        **{k: v for k, v in _DECODER.items() if k != "head_dim"},
        use_sliding_window=True, sliding_window=4, max_window_layers=1,
    ),
    "qwen3": transformers.Qwen3Config(**_DECODER),
}  # fmt: skip
_PLAIN = {name: value for name, value in _DECODER.items() if name != "head_dim"}
ROTARY: dict[str, Any] = {  # they get transformers' own mask
    "gemma": transformers.GemmaConfig(**_DECODER),
    "gemma2": transformers.Gemma2Config(**_DECODER, sliding_window=4),
    "gemma3_text": transformers.Gemma3TextConfig(
        **_DECODER, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    ),
    "phi": transformers.PhiConfig(**_PLAIN),
    "phi3": transformers.Phi3Config(**_PLAIN, sliding_window=4),
    "olmo": transformers.OlmoConfig(**_PLAIN),
    "olmo2": transformers.Olmo2Config(**_PLAIN),
    "falcon": transformers.FalconConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=2,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    ),
}  # fmt: skip
VIT = transformers.ViTConfig(
    hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=2, intermediate_size=32,
    image_size=16, patch_size=8,
)  # fmt: skip

PICTURES: dict[str, Any] = {
    "vit": VIT,
    "dinov2": transformers.Dinov2Config(
        hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=2, image_size=16,
        patch_size=8,
    ),
    "swin": transformers.SwinConfig(
        embed_dim=8, depths=[2, 1], num_heads=[1, 2], window_size=4, image_size=16, patch_size=2
    ),
    "convnext": transformers.ConvNextConfig(
        num_stages=2, hidden_sizes=[4, 8], depths=[2, 1], image_size=16
    ),
    "convnextv2": transformers.ConvNextV2Config(
        num_stages=2, hidden_sizes=[4, 8], depths=[2, 1], image_size=16
    ),
}  # fmt: skip
GENERATORS: dict[str, Any] = {  # an encoder and a decoder
    "t5": transformers.T5Config(
        vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=32, num_layers=LAYERS, num_heads=2
    ),
    "bart": transformers.BartConfig(
        vocab_size=VOCABULARY, d_model=WIDTH, encoder_layers=LAYERS, decoder_layers=LAYERS,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32,
        decoder_ffn_dim=32, max_position_embeddings=40,
    ),
}  # fmt: skip


def save(folder: Path, config: Any, auto: str, seed: int = 5) -> Path:
    """A model with random weights, biases too; returns ``folder``."""
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(seed)
        model = getattr(transformers, auto).from_config(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(str(folder))
    if auto == "AutoModelForImageClassification":
        scale = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]}
        (folder / "preprocessor_config.json").write_text(json.dumps(scale))
    return folder


def texts(clients: int = 1, seed: int = 0) -> dict[str, torch.Tensor]:
    """``[clients, 4, 9]`` token ids of ragged length with garbage as padding; the last is empty."""
    drawn = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (clients, 4, 9), generator=drawn)
    lengths = torch.tensor([9, 6, 2, 0])
    mask = (torch.arange(9) < lengths[:, None]).float().expand(clients, 4, 9)
    labels = torch.randint(0, 3, (clients, 4), generator=drawn)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


SEQUENCE = "AutoModelForSequenceClassification"
TOKENS = "AutoModelForTokenClassification"


CAUSAL = "AutoModelForCausalLM"


WRITER = "AutoModelForSeq2SeqLM"


IMAGE = "AutoModelForImageClassification"


def three_classes(config: Any) -> Any:
    return type(config).from_dict({**config.to_dict(), "id2label": dict(enumerate("abc"))})


def tiny_backbone(tmp_path: Path, name: str, kind: Any, pooling: Any, **fields: Any) -> Backbone:
    config = three_classes({**ENCODERS, **DECODERS, **ROTARY}[name])
    auto = CAUSAL if kind == "causal-lm" else "AutoModel" if pooling == "mean" else SEQUENCE
    folder = save(tmp_path / name, config, auto)
    return load(ModelConfig(str(folder), pooling=pooling, **fields), kind, 3, seed=1)


def call(
    backbone: Backbone, batch: dict[str, Tensor], state: dict[str, Tensor] | None = None
) -> Tensor:
    output = functional_call(backbone.model, state or {}, (), backbone.prepare(batch))
    return backbone.logits(output)


def check_vmap(backbone: Backbone, state: dict[str, Tensor], batches: dict[str, Tensor]) -> None:
    def loss(state: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        return call(backbone, batch, state).log_softmax(-1)[..., 1].sum()

    together = vmap(grad(loss), in_dims=(None, 0))(state, batches)
    for client in range(3):
        alone = grad(loss)(state, {name: value[client] for name, value in batches.items()})
        for name, value in alone.items():
            assert value.isfinite().all()
            torch.testing.assert_close(together[name][client], value, atol=1e-5, rtol=1e-4)
