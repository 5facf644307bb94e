from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from fedtailor.errors import InputError
from fedtailor.layers.parts import require_blocks
from fedtailor.models import (
    PROJECTIONS,
    ModelConfig,
    find_blocks,
    find_head,
    linearise,
    load_model,
)
from fedtailor.task.backbone import Backbone
from tests.models.small import (
    DECODERS,
    ENCODERS,
    GENERATORS,
    IMAGE,
    LAYERS,
    PICTURES,
    ROTARY,
    SEQUENCE,
    save,
    three_classes,
)

BERT = "{}.attention.output.dense", "{}.output.dense"
LLAMA = "{}.self_attn.o_proj", "{}.mlp.down_proj"
CONVNEXT = "{}.pwconv1", "{}.pwconv2"
IS_OLD = Version(transformers.__version__) < Version("5.18")
DINOV2 = "{}.attention.output.dense" if IS_OLD else "{}.attention.o_proj"
EXPECTED = {  # the list of the blocks, and the projections of each
    "bert": ("bert.encoder.layer", BERT),
    "roberta": ("roberta.encoder.layer", BERT),
    "xlm-roberta": ("roberta.encoder.layer", BERT),
    "electra": ("electra.encoder.layer", BERT),
    "deberta-v2": ("deberta.encoder.layer", BERT),
    "mpnet": ("mpnet.encoder.layer", ("{}.attention.attn.o", "{}.output.dense")),
    "distilbert": ("distilbert.transformer.layer", ("{}.attention.out_lin", "{}.ffn.lin2")),
    "modernbert": ("model.layers", ("{}.attn.Wo", "{}.mlp.Wo")),
    "gpt2": ("transformer.h", ("{}.attn.c_proj", "{}.mlp.c_proj")),
    "llama": ("model.layers", LLAMA),
    "mistral": ("model.layers", LLAMA),
    "qwen2": ("model.layers", LLAMA),
    "qwen3": ("model.layers", LLAMA),
    "gemma": ("model.layers", LLAMA),
    "gemma2": ("model.layers", LLAMA),
    "gemma3_text": ("model.layers", LLAMA),
    "phi": ("model.layers", ("{}.self_attn.dense", "{}.mlp.fc2")),
    "phi3": ("model.layers", LLAMA),
    "olmo": ("model.layers", LLAMA),
    "olmo2": ("model.layers", LLAMA),
    "falcon": ("transformer.h", ("{}.self_attention.dense", "{}.mlp.dense_4h_to_h")),
    "vit": ("vit.layers", ("{}.attention.o_proj", "{}.mlp.fc2")),
    "dinov2": ("dinov2.encoder.layer", (DINOV2, "{}.mlp.fc2")),
    "swin": ("swin.encoder.layers", ("{}.attention.o_proj", "{}.mlp.fc2")),
    "convnext": ("convnext.encoder.stages", CONVNEXT),
    "convnextv2": ("convnextv2.encoder.stages", CONVNEXT),
}
NUMBERS = dict.fromkeys(EXPECTED, ("0", "1")) | {
    "swin": ("0.blocks.0", "0.blocks.1", "1.blocks.0"),
    "convnext": ("0.layers.0", "0.layers.1", "1.layers.0"),
    "convnextv2": ("0.layers.0", "0.layers.1", "1.layers.0"),
}
HEADS = dict.fromkeys((*DECODERS, *ROTARY), ("score",)) | {
    "distilbert": ("classifier", "pre_classifier"),
    "modernbert": ("classifier", "head"),
}


def build(name: str) -> nn.Module:
    config = {**ENCODERS, **DECODERS, **ROTARY, **PICTURES}[name]
    auto = getattr(transformers, IMAGE if name in PICTURES else SEQUENCE)
    model: nn.Module = auto.from_config(config)
    return model


@pytest.mark.parametrize("name", EXPECTED)
def test_blocks_and_heads_of_every_architecture(name: str) -> None:
    model = linearise(build(name))
    below, ends = EXPECTED[name]
    blocks = tuple(
        tuple(end.format(f"{below}.{number}") for end in ends) for number in NUMBERS[name]
    )
    assert find_blocks(model) == blocks
    assert find_head(model) == HEADS.get(name, ("classifier",))
    wrapped = nn.ModuleDict({"encoder": model})
    assert find_blocks(wrapped) == tuple(tuple(f"encoder.{p}" for p in b) for b in blocks)
    for block in blocks:
        assert all(isinstance(model.get_submodule(path), nn.Linear) for path in block)


@pytest.mark.parametrize(
    ("name", "encoder", "decoder"),
    [
        (
            "t5",
            ("block.{}.layer.0.SelfAttention.o", "block.{}.layer.1.DenseReluDense.wo"),
            ("block.{}.layer.0.SelfAttention.o", "block.{}.layer.2.DenseReluDense.wo"),
        ),
        (
            "bart",
            ("layers.{}.self_attn.out_proj", "layers.{}.fc2"),
            ("layers.{}.self_attn.out_proj", "layers.{}.fc2"),
        ),
    ],
)
def test_encoder_and_decoder_both_have_blocks(
    name: str, encoder: tuple[str, str], decoder: tuple[str, str]
) -> None:
    both = (("encoder", encoder), ("decoder", decoder))
    blocks = tuple(
        tuple(f"{side}.{end.format(number)}" for end in ends)
        for side, ends in both
        for number in (0, 1)
    )
    assert find_blocks(transformers.AutoModel.from_config(GENERATORS[name])) == blocks
    model = getattr(transformers, SEQUENCE).from_config(GENERATORS[name])
    assert find_head(model) == ("classification_head",)


def test_every_known_type_is_tested() -> None:
    assert set(PROJECTIONS) == {*EXPECTED, *GENERATORS}


def test_a_language_model_has_no_head_of_its_own() -> None:
    for name in ("gpt2", "llama"):
        model = transformers.AutoModelForCausalLM.from_config(DECODERS[name])
        assert find_head(model) == ()
        assert find_head(model, ["lm_head"]) == ("lm_head",)


def test_conv1d_becomes_linear_with_the_same_outputs() -> None:
    model = transformers.GPT2Model(DECODERS["gpt2"]).eval()
    ids = torch.arange(6)[None]
    before = model(ids).last_hidden_state
    assert linearise(model) is model
    assert not any(isinstance(module, Conv1D) for module in model.modules())
    torch.testing.assert_close(model(ids).last_hidden_state, before, atol=1e-6, rtol=1e-6)


def tower() -> nn.Module:
    def layer() -> nn.Module:
        return nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "n": nn.LayerNorm(2)})

    sides = {side: nn.ModuleList([layer(), layer()]) for side in ("left", "right")}
    return nn.ModuleDict({**sides, "out": nn.Linear(2, 2)})


@pytest.mark.parametrize(
    ("targets", "blocks"),
    [
        (["left.*.a"], (("left.0.a",), ("left.1.a",))),
        (["left.*"], (("left.0.a", "left.0.b"), ("left.1.a", "left.1.b"))),
        (["*.1.b", "out"], (("left.1.b",), ("right.1.b",), ("out",))),
        (
            ["all-linear", "out"],
            (*((f"{s}.{n}.a", f"{s}.{n}.b") for s in ("left", "right") for n in (0, 1)), ("out",)),
        ),
    ],
)
def test_patterns_choose_linear_layers(targets: list[str], blocks: Any) -> None:
    assert find_blocks(tower(), targets) == blocks


def test_patterns_that_match_nothing_are_told_with_what_there_is() -> None:
    with pytest.raises(
        InputError, match=r"model.targets '\*.n' .* candidates: left.\*.a, left.\*.b"
    ):
        find_blocks(tower(), ["*.a", "*.n"])
    with pytest.raises(InputError, match=r"model.head 'roof' matches nothing"):
        find_head(tower(), ["roof"])


def test_a_large_models_candidates_fit_a_line_the_outermost_first() -> None:
    model = transformers.BertForSequenceClassification(ENCODERS["bert"])
    with pytest.raises(InputError) as error:
        find_head(model, ["roof"])
    assert "candidates: bert, classifier, bert.embeddings, bert.encoder, " in str(error.value)
    assert "bert.encoder.layer.*, " in str(error.value)
    assert str(error.value).endswith(", and 5 more")
    assert len(str(error.value)) < 900


def test_a_model_without_known_blocks_is_told_what_could_be_named() -> None:
    backbone = Backbone(tower(), blocks=find_blocks(tower()), name="tower")
    assert backbone.blocks == ()
    with pytest.raises(InputError, match=r"'tower' has no recognised .* left.\*.a"):
        require_blocks(backbone)


def test_the_outermost_match_is_the_head() -> None:
    assert find_head(tower(), ["left*", "out"]) == ("left", "out")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # of PEFT
@pytest.mark.parametrize("name", ["bert", "llama", "gpt2", "qwen3"])
def test_all_linear_layers_are_pefts_without_a_pooler(tmp_path: Path, name: str) -> None:
    config = three_classes({**ENCODERS, **DECODERS}[name])
    folder = str(save(tmp_path, config, SEQUENCE))
    own = ModelConfig(folder, targets=("all-linear",), pooling="native")
    blocks = load_model(own, "classification", 3, seed=0).blocks
    layers = LoraConfig(task_type="SEQ_CLS", target_modules="all-linear")
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    adapted = get_peft_model(linearise(plain), layers)
    theirs = {path for path in adapted.targeted_module_names if "pooler" not in path}
    ours = {path for block in blocks for path in block}
    in_block = re.compile(r"\.[01]\..*")
    assert {in_block.search(path)[0] for path in ours} == {  # type: ignore[index]
        in_block.search(path)[0]  # type: ignore[index]
        for path in theirs
    }
    assert len(ours) == len(theirs)
    assert len(blocks) == LAYERS
