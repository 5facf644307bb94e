from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fedtailor.errors import InputError
from fedtailor.models import ModelConfig, load_model, load_tokenizer
from fedtailor.models.packages import quiet
from fedtailor.models.pooled import Pooled
from tests.models.small import (
    CAUSAL,
    DECODERS,
    ENCODERS,
    ROTARY,
    SEQUENCE,
    call,
    check_vmap,
    save,
    texts,
    tiny_backbone,
)

CASES = [
    *((name, "classification", pooling) for name in ENCODERS for pooling in ("native", "mean")),
    *((name, "classification", pooling) for name in DECODERS for pooling in ("native", "mean")),
    *((name, "causal-lm", None) for name in (*DECODERS, *ROTARY)),
]


@pytest.mark.parametrize(("name", "kind", "pooling"), CASES)
def test_logits_are_those_of_transformers_on_each_text_alone(
    tmp_path: Path, name: str, kind: str, pooling: str | None
) -> None:
    backbone = tiny_backbone(tmp_path, name, kind, pooling)
    auto = CAUSAL if kind == "causal-lm" else "AutoModel" if pooling == "mean" else SEQUENCE
    with quiet():
        plain = getattr(transformers, auto).from_pretrained(str(tmp_path / name))
    batch = {k: v[0] for k, v in texts().items()}
    logits = call(backbone, batch)
    assert logits.isfinite().all()
    for row, length in enumerate((9, 6, 2)):
        ids = batch["input_ids"][row : row + 1, :length]
        output = plain(input_ids=ids)
        if pooling == "mean":
            assert isinstance(backbone.model, Pooled)
            expected = backbone.model.head(output.last_hidden_state.mean(1))
        else:
            expected = output.logits
        found = logits[row, :length] if kind == "causal-lm" else logits[row]
        torch.testing.assert_close(found, expected[0], atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind", "pooling"), [c for c in CASES if c[0] not in ROTARY])
def test_gradients_under_vmap_are_those_of_one_client_at_a_time(
    tmp_path: Path, name: str, kind: str, pooling: str | None
) -> None:
    backbone = tiny_backbone(tmp_path, name, kind, pooling)
    paths = (*backbone.head, backbone.blocks[1][1])
    state = {
        name: parameter.detach()
        for name, parameter in backbone.model.named_parameters()
        if name.startswith(paths)
    }
    assert state
    check_vmap(backbone, state, texts(clients=3))


@pytest.mark.slow
def test_a_new_head_follows_the_seed_and_leaves_the_global_generator_alone(tmp_path: Path) -> None:
    folder = save(tmp_path, ENCODERS["distilbert"], "AutoModel")
    for pooling in ("native", "mean"):
        config = ModelConfig(str(folder), pooling=pooling)
        before = torch.get_rng_state()
        models = [load_model(config, "classification", 3, seed=seed).model for seed in (0, 0, 1)]
        assert torch.get_rng_state().equal(before)
        first, same, other = (
            torch.cat([p.flatten() for p in model.parameters()]) for model in models
        )
        assert first.equal(same)
        assert not first.equal(other)


def test_random_weights_follow_the_seed(tmp_path: Path) -> None:
    folder = save(tmp_path, DECODERS["llama"], CAUSAL)
    config = ModelConfig(str(folder), pretrained=False)
    models = [load_model(config, "causal-lm", 0, seed=seed).model for seed in (0, 0, 1)]
    weights = [model.get_parameter("model.layers.0.mlp.up_proj.weight") for model in models]
    assert weights[0].equal(weights[1])
    assert not weights[0].equal(weights[2])


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_nothing_is_printed(
    name: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = save(tmp_path, {**ENCODERS, **DECODERS}[name], "AutoModel")
    capfd.readouterr()
    level = logging.getLogger("transformers.modeling_utils").level
    transformers.utils.logging.add_handler(caplog.handler)
    try:
        load_model(ModelConfig(str(folder)), "classification", 3, seed=0)
    finally:
        transformers.utils.logging.remove_handler(caplog.handler)
    assert not caplog.records  # also what transformers writes to the stderr that it has kept
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("transformers.modeling_utils").level == level
    assert transformers.utils.logging.is_progress_bar_enabled()


def test_a_folder_without_tokenizer_files_has_no_tokenizer(tmp_path: Path) -> None:
    folder = save(tmp_path, ENCODERS["bert"], "AutoModel")
    assert load_tokenizer(ModelConfig(str(folder))) is None
    assert load_tokenizer(ModelConfig("efficientnet-lite0")) is None


def test_user_patterns_choose_blocks_and_head(tmp_path: Path) -> None:
    backbone = tiny_backbone(
        tmp_path,
        "llama",
        "classification",
        "mean",
        targets=("*.q_proj", "*.v_proj"),
        head=("head",),
    )
    assert backbone.blocks == tuple(
        tuple(f"encoder.layers.{i}.self_attn.{p}_proj" for p in "qv") for i in range(2)
    )
    assert backbone.head == ("head",)


@pytest.mark.parametrize(
    ("config", "kind", "modality", "message"),
    [
        (ModelConfig("minilm-l6"), "classification", "text", "unknown model 'minilm-l6'.*minilm"),
        (ModelConfig("./nowhere"), "classification", "text", "no folder './nowhere'"),
        (ModelConfig("no-such/model"), "classification", "text", "hub"),
        (ModelConfig("minilm"), "causal-lm", "text", "can't be used for 'causal-lm'"),
        (ModelConfig("minilm"), "classification", "image", "is for text data, not image data"),
        (ModelConfig("efficientnet-lite0"), "causal-lm", "image", "needs texts"),
        (ModelConfig("smollm2-135m", pooling="mean"), "causal-lm", "text", "model.pooling"),
        (ModelConfig("minilm", image_size=32), "classification", "text", "model.image_size"),
        (ModelConfig("minilm", head=("top",)), "classification", "text", "model.head 'top'"),
        (ModelConfig("minilm", targets=("*.fc9",)), "classification", "text", "dense"),
    ],
)
def test_bad_input_is_told_in_one_line(
    config: ModelConfig, kind: Any, modality: Any, message: str
) -> None:
    with pytest.raises(InputError, match=message) as error:
        load_model(config, kind, 3, seed=0, modality=modality)
    assert "\n" not in str(error.value)
