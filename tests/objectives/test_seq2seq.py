"""Texts that a model writes: their tokens, what is written, and from a table to an export."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import fedtailor as ft
from fedtailor.data.table import Dataset
from fedtailor.engine.metrics import Metrics
from fedtailor.methods import METHODS
from fedtailor.models import load_model
from fedtailor.objectives import Seq2Seq
from fedtailor.objectives.cells import Cells
from fedtailor.task.backbone import Backbone
from tests import kinds
from tests.flower.grid import experiment
from tests.models.small import GENERATORS, WRITER, check_vmap, save

TASK = Seq2Seq()
END = 1
_SPECIAL = {"pad_token_id": 0, "eos_token_id": END, "bos_token_id": END}
MODELS = {
    "t5": {**_SPECIAL, "decoder_start_token_id": 0},
    "bart": {**_SPECIAL, "decoder_start_token_id": 7, "forced_eos_token_id": None},
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Words, and an end after each text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = sorted(kinds.WORDS)
    vocabulary = {word: at for at, word in enumerate(["[PAD]", "[END]", "[UNK]", *words])}
    made = Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single="$A [END]", special_tokens=[("[END]", END)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", eos_token="[END]", unk_token="[UNK]"
    )


@pytest.fixture(scope="module", params=["t5", pytest.param("bart", marks=pytest.mark.slow)])
def model(request: Any, tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    config = copy.deepcopy(GENERATORS[request.param])
    config.update({**MODELS[request.param], "vocab_size": len(tokenizer)})
    folder = save(tmp_path_factory.mktemp("writer") / "model", config, WRITER)
    tokenizer.save_pretrained(folder)
    return folder


def backbone_of(model: Path) -> Backbone:
    return load_model(ft.ModelConfig(str(model)), TASK, 0, 0)


def read(tokenizer: Any, max_length: int = 12) -> Dataset:
    source = kinds.source(TASK.name)
    return source.load(source.config(ft.DataConfig(max_length=max_length)), tokenizer)


def test_the_end_of_a_target_is_learned_once_and_only_where_it_is(tokenizer: Any) -> None:
    (one,) = TASK.encode(["the ward"], ["a bed [END]"], tokenizer, 6)
    assert one.ids == tokenizer("the ward")["input_ids"]
    assert one.labels == [*tokenizer("a bed")["input_ids"]]
    (cut,) = TASK.encode(["the ward"], ["a bed for each patient by night"], tokenizer, 6)
    assert cut.is_cut
    assert cut.labels is not None
    assert len(cut.labels) == 6
    assert END not in cut.labels


def test_what_is_no_text_is_named() -> None:
    found = TASK.targets(Cells(["a bed", None, " ", 7], 4))
    assert [*found.values[found.is_known]] == ["a bed", "7"]
    with pytest.raises(ft.InputError, match=r"column 's' holds \['a'\] in row 2: .* needs texts"):
        TASK.targets(Cells(["a", ["a"]], 2, place="column 's'"))


def test_a_table_of_long_targets_is_recognised() -> None:
    texts = ["the ward has a bed", "a patient came in by night", "each left at noon today"]
    names = ["long", "short", "long"]
    assert TASK.recognised({"article": texts, "highlights": texts}) == {
        "text": "article",
        "label": "highlights",
    }
    assert TASK.recognised({"article": texts, "summary": names}) == {}
    assert TASK.recognised({"article": texts, "label": texts}) == {}


def test_another_model_is_refused(tmp_path: Path) -> None:
    folder = save(tmp_path / "bert", kinds.ENCODER, "AutoModel")
    with pytest.raises(ft.InputError, match="is a bert; 'seq2seq' needs an encoder and a decoder"):
        load_model(ft.ModelConfig(str(folder)), TASK, 0, 0)


def test_a_decoder_begins_with_the_padding_where_no_other_token_is_named(tmp_path: Path) -> None:
    config = GENERATORS["t5"]
    assert not hasattr(config, "decoder_start_token_id")
    folder = save(tmp_path / "t5", config, WRITER)
    kinds.save_tokenizer(folder)
    assert load_model(ft.ModelConfig(str(folder)), TASK, 0, 0).prepare.start == 0  # type: ignore[attr-defined]


def test_rouge_is_that_of_a_count_of_words() -> None:
    right, said = [["the ward has a bed"], ["noon"]], ["the ward had one bed", "night"]
    scores = {name: one(right, said) for name, one in TASK.metrics.items()}
    # 3 of 5 words, 1 of 4 pairs, and 3 of 5 in order; the second has none
    assert scores == pytest.approx(
        {"rouge1": 0.3, "rouge2": 0.125, "rougeL": 0.3, "exact_match": 0.0, "chrf": 0.335}, abs=1e-3
    )


def test_what_rouge_needs_is_said_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    generate = ft.GenerateConfig(examples=2)
    wanted = Metrics(ft.EvaluateConfig(metrics=("exact_match", "rouge1"), generate=generate))
    with pytest.raises(ft.InputError, match=r"'rouge1' needs .* pip install 'fedtailor\[rouge\]'"):
        wanted.check(TASK)
    wanted.check(TASK, remote=True)  # a server computes none


@pytest.mark.slow
def test_clients_are_trained_together(model: Path, tokenizer: Any) -> None:
    backbone, dataset = backbone_of(model), read(tokenizer)
    batch = dataset.batch(np.arange(12))
    state = {
        name: value.detach()
        for name, value in backbone.model.named_parameters()
        if "decoder" in name and "weight" in name
    }
    check_vmap(backbone, state, {n: v.view(3, 4, *v.shape[1:]) for n, v in batch.items()})


@pytest.mark.slow
@pytest.mark.parametrize("label", ["fedhft", "flora", "fedmask", "fedalt", "lora-fair", "fedsdg"])
def test_the_layers_of_methods_stand_in_both_parts(label: str, model: Path, tokenizer: Any) -> None:
    backbone = backbone_of(model)
    assert [len(block) for block in backbone.blocks] == [2] * 4  # of the encoder and the decoder
    task = ft.Task(backbone, METHODS[label]().adapt)
    for part in ("encoder", "decoder"):
        assert sum(f"{part}." in block[0] for block in backbone.blocks) == 2
    batch = read(tokenizer, 6).batch(np.arange(3))
    loss, _ = task.loss(task.state, batch, torch.tensor(0))
    assert loss.isfinite()


def test_a_method_that_needs_a_head_is_refused(model: Path, tokenizer: Any, tmp_path: Path) -> None:
    message = "has no recognised task head; name the private parts"
    chosen = experiment("fedrep", rounds=1, split={"clients": 3})
    with pytest.raises(ft.InputError, match=message):
        ft.run(chosen, tmp_path / "out", data=read(tokenizer, 6), backbone=backbone_of(model))
