"""A language model learns where a text ends, from the file to the exported folder."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers
from transformers import PreTrainedTokenizerFast

import fedtailor as ft
from fedtailor.data import load_data
from fedtailor.export.folder import export_model
from fedtailor.models import load_model, load_tokenizer
from fedtailor.models.packages import quiet
from fedtailor.runs.experiment import parse
from fedtailor.runs.trained import open_trained
from tests.exported import exported
from tests.models.small import CAUSAL, DECODERS, save

pytestmark = pytest.mark.slow

WORDS = ["[END]", "[STOP]", "patient", "fever", "cough", "since", "two", "days"]
TEXTS = [f"patient {what} since two days" for what in ("fever", "cough")]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with random weights; its end-of-text token is its padding token, too."""
    words = tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[STOP]")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    config = type(DECODERS["llama"]).from_dict(
        {**DECODERS["llama"].to_dict(), "vocab_size": len(WORDS), "eos_token_id": [0, 1]}
    )
    out = save(tmp_path_factory.mktemp("model") / "llama", config, CAUSAL)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="[END]", additional_special_tokens=["[STOP]"]
    ).save_pretrained(out)
    return out


def write(path: Path, rows: list[tuple[str, str]]) -> str:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("text", "ward"), *rows])
    return str(path)


@pytest.fixture(scope="module")
def run(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    rows = [(text, ward) for ward in ("a", "b") for text in TEXTS * 6]
    experiment = parse({
        "rounds": 2,
        "methods": {"fedavg": {"optimiser": {"name": "adam", "lr": 0.02}}},
        "data": {"path": write(folder / "all.csv", rows), "client": "ward", "task": "causal-lm",
                 "max_length": 8},
        "split": {"scheme": "natural", "min_examples": 1},
        "model": {"name": str(model_folder)},
        "local": {"batch_size": 4, "epochs": 8},
    })  # fmt: skip
    return ft.run(experiment, folder / "run")


def test_the_end_is_a_target_even_where_it_is_the_padding(run: Path) -> None:
    trained = open_trained(run, "fedavg")
    assert trained.task.backbone.tokenizer.pad_token == "[END]"
    dataset = load_data(trained.experiment.data, trained.task.backbone.tokenizer)
    assert dataset.inputs.lengths(np.arange(2)).tolist() == [6, 6]
    batch = dataset.batch(np.arange(2))
    logits = trained.task.logits(trained.client_state(0), batch)
    scores = trained.task.score(logits, batch)
    assert scores.count.tolist() == [5, 5]  # four words and the end
    assert scores.correct.sum() == 9  # all but one of two symptoms


def test_a_text_that_is_generated_ends(run: Path, tmp_path: Path) -> None:
    (text,) = ft.load_model(run, "fedavg", "a").predict(["patient fever"])
    assert text == "since two days"
    out = export_model(run, "fedavg", tmp_path / "out", client="a", merge=True)
    with quiet():  # an exported model switches progress bars off for good
        model = exported(out)
    assert model.answer("patient fever") == "patient fever since two days"
    generation = transformers.GenerationConfig.from_pretrained(out)
    assert generation.eos_token_id == [0, 1]


def test_a_prompt_is_read_up_to_the_models_window(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ft.load_model(run, "fedavg", "a")
    long = "patient fever " * 19  # 38 of 40 tokens; data.max_length is 8
    said: list[str] = []
    (text,) = model.predict([long + "since"], say=said.append)
    assert len(text.split()) <= 1
    assert "".join(said) == text
    assert capsys.readouterr().err == ""
    with pytest.raises(ft.InputError, match="input 2 has more than 39 tokens, and this model rea"):
        model.predict(["patient", long + "since two days"])


def test_a_client_that_joins_has_texts_of_the_same_form(run: Path, tmp_path: Path) -> None:
    rows = [(text, "c") for text in TEXTS * 3]
    result = ft.onboard(run, "fedavg", write(tmp_path / "new.csv", rows), "c")
    counted = {split: result.scores["global"][split]["count"] for split in ("validation", "test")}
    assert counted == {split: 5 * result.num_examples[split] for split in counted}


def test_all_ends_that_the_model_names_are_ends(model_folder: Path) -> None:
    def ends(**fields: Any) -> frozenset[int]:
        (model_folder / "generation_config.json").write_text(json.dumps(fields))
        return load_model(ft.ModelConfig(str(model_folder)), "causal-lm", 0, seed=0).ends

    assert ends(eos_token_id=[0, 1]) == ends(eos_token_id=1) == {0, 1}
    assert ends(eos_token_id=[2]) == ends() == {0}  # a word like any other ends no text


def test_a_tokenizer_without_an_end_is_told(model_folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(ft.ModelConfig(str(model_folder)))
    tokenizer.eos_token = None
    path = write(tmp_path / "a.csv", [(text, "a") for text in TEXTS])
    config = ft.DataConfig(path=path, task="causal-lm")
    (told,) = load_data(config, tokenizer).omissions
    assert told.text == (
        "2 rows without an end-of-text token, as the tokenizer has none (eos_token): the model "
        "does not learn where a text ends"
    )
