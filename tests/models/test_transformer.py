"""Models of transformers: weights, heads and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from fedtailor.errors import InputError
from fedtailor.models import ModelConfig
from fedtailor.models import load_model as load
from fedtailor.models.packages import quiet
from tests.models.small import (
    ENCODERS,
    GENERATORS,
    IMAGE,
    PICTURES,
    VIT,
    VOCABULARY,
    call,
    check_vmap,
    save,
    three_classes,
    tiny_backbone,
)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of vmap, by Swin's pooling
@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_scaled_as_the_processor_says(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, three_classes(PICTURES[name]), IMAGE)
    backbone = load(ModelConfig(str(folder)), "classification", 3, seed=0, modality="image")
    assert backbone.head == ("classifier",)
    assert backbone.tokenizer is None
    pixels = torch.rand(3, 2, 1, 16, 16)
    mean, std = torch.tensor([0.4, 0.5, 0.6]), torch.tensor([0.2, 0.3, 0.4])
    scaled = (pixels[0].expand(-1, 3, -1, -1) - mean[:, None, None]) / std[:, None, None]
    with quiet():
        plain = transformers.AutoModelForImageClassification.from_pretrained(str(folder))
    expected = plain(pixel_values=scaled).logits
    torch.testing.assert_close(
        call(backbone, {"pixel_values": pixels[0]}), expected, atol=1e-5, rtol=1e-4
    )
    names = ["classifier.weight", f"{backbone.blocks[0][1]}.weight"]
    state = {name: backbone.model.get_parameter(name).detach() for name in names}
    check_vmap(backbone, state, {"pixel_values": pixels})


@pytest.mark.parametrize("pretrained", [True, False])
def test_another_picture_size(tmp_path: Path, pretrained: bool) -> None:
    folder = save(tmp_path, three_classes(VIT), IMAGE)
    config = ModelConfig(str(folder), image_size=32, pretrained=pretrained)
    backbone = load(config, "classification", 3, seed=0, modality="image")
    state = {"classifier.weight": backbone.model.get_parameter("classifier.weight").detach()}
    check_vmap(backbone, state, {"pixel_values": torch.rand(3, 2, 3, 20, 20)})
    with pytest.raises(InputError, match=r"channels; .* takes 1 or 3"):
        backbone.prepare({"pixel_values": torch.rand(2, 4, 20, 20)})


def test_a_convolutional_network_takes_another_size_as_it_is(tmp_path: Path) -> None:
    config = transformers.ConvNextConfig(
        num_stages=2, hidden_sizes=[4, 8], depths=[1, 1], image_size=16, num_labels=3
    )
    folder = save(tmp_path, config, IMAGE)
    backbone = load(ModelConfig(str(folder), image_size=24), "classification", 3, 0, "image")
    batch = {"pixel_values": torch.rand(2, 1, 8, 8)}
    assert backbone.prepare(batch).keys() == {"pixel_values"}
    assert call(backbone, batch).shape == (2, 3)
    assert backbone.head == ("classifier",)


def test_a_new_head_has_small_weights_and_no_bias(tmp_path: Path) -> None:
    folder = save(tmp_path, ENCODERS["distilbert"], "AutoModel")
    model = load(ModelConfig(str(folder)), "classification", 3, seed=0).model
    assert 0.015 < model.get_parameter("pre_classifier.weight").std() < 0.025
    assert not model.get_parameter("classifier.bias").any()
    encoder = transformers.AutoModel.from_config(ENCODERS["distilbert"])
    assert encoder.embeddings.word_embeddings.weight.shape == (VOCABULARY, 16)


def test_a_pooler_with_new_weights_belongs_to_the_head(tmp_path: Path) -> None:
    masked = save(tmp_path / "masked", ENCODERS["bert"], "AutoModelForMaskedLM")
    backbone = load(ModelConfig(str(masked)), "classification", 3, seed=0)
    assert backbone.head == ("classifier", "bert.pooler.dense")
    whole = save(tmp_path / "whole", ENCODERS["bert"], "AutoModel")
    assert load(ModelConfig(str(whole)), "classification", 3, seed=0).head == ("classifier",)


@pytest.mark.parametrize("name", ["bert", "distilbert", "gpt2", "llama"])
def test_dropout_is_set_everywhere_but_in_the_attention(tmp_path: Path, name: str) -> None:
    backbone = tiny_backbone(tmp_path, name, "classification", "native", dropout=0.25)
    for path, module in backbone.model.named_modules():
        if isinstance(module, nn.Dropout):
            inside = path.endswith(("attention.self.dropout", "attention.dropout", "attn_dropout"))
            assert module.p == (0.0 if inside else 0.25), path
    assert not backbone.model.training


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    def message(folder: Path, task: Any = "classification", modality: Any = "text") -> str:
        with pytest.raises(InputError) as error:
            load(ModelConfig(str(folder)), task, 3, seed=0, modality=modality)
        return str(error.value)

    empty = tmp_path / "empty"
    empty.mkdir()
    assert "can't read model" in message(empty)
    bert = save(tmp_path / "bert", ENCODERS["bert"], "AutoModel")
    assert "sees the words to come" in message(bert, task="causal-lm")
    (bert / "model.safetensors").write_bytes(b"xx")
    assert "can't load model" in message(bert)
    vit = save(tmp_path / "vit", VIT, IMAGE)
    (vit / "preprocessor_config.json").unlink()
    assert "preprocessor_config.json" in message(vit, modality="image")


@pytest.mark.parametrize("name", GENERATORS)
def test_a_classifier_on_an_encoder_decoder_is_refused(tmp_path: Path, name: str) -> None:
    folder = save(tmp_path, GENERATORS[name], "AutoModel")
    for pooling in ("native", "mean"):
        with pytest.raises(InputError, match=rf"is a {name}, an encoder and a decoder, .* BERT"):
            load(ModelConfig(str(folder), pooling=pooling), "classification", 3, seed=0)


def test_weights_that_are_not_there_are_an_error(tmp_path: Path) -> None:
    shallow = type(ENCODERS["bert"]).from_dict(
        {**ENCODERS["bert"].to_dict(), "num_hidden_layers": 1}
    )
    folder = save(tmp_path, shallow, "AutoModel")
    ENCODERS["bert"].save_pretrained(str(folder))
    with pytest.raises(InputError, match=r"lacks weights of .*layer\.1"):
        load(ModelConfig(str(folder)), "classification", 3, seed=0)
