"""Texts through an exported model: the tokens are ours, and a language model goes on writing."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from transformers import PreTrainedTokenizerFast

import fedtailor as ft
from fedtailor.data.templates import Template
from fedtailor.export.folder import _prompts, export_model
from fedtailor.runs.trained import open_trained
from tests import kinds
from tests.models.small import CAUSAL, DECODERS, VOCABULARY, save

WORDS = ["[PAD]", "[END]", "the", "price", "of", "wheat", "oil", "gold", "rose", "fell", "again"]
WORDS += [f"word{number}" for number in range(len(WORDS), VOCABULARY)]

_CODE = """
import sys
sys.modules["fedtailor"] = None
sys.path.insert(0, sys.argv[1])
import torch
from model import Model
model = Model()
batch = model.batch(sys.argv[2:])
written = model.answer(sys.argv[2])
model.about["inputs"]["positions"] = 4
logits, model.logits = model.logits(batch), None
torch.save((batch, logits, written, model.answer(sys.argv[2])), sys.argv[1] + ".pt")
"""

_WRITES = """
import json, sys
sys.modules["fedtailor"] = None
sys.path.insert(0, sys.argv[1])
from model import Model
model, said = Model(), []
for ends in ([], [int(sys.argv[3])]):
    model.about["ends"] = ends
    for go_on in (model._with_cache, model._without_cache):
        said.append(go_on(model.prompt(sys.argv[2]), 6)[0].tolist())
print(json.dumps(said))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny GPT-2 that knows a few words."""
    words = tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[PAD]")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    out = save(tmp_path / "gpt2", DECODERS["gpt2"], CAUSAL)
    (out / "generation_config.json").write_text('{"repetition_penalty": 9.0}')  # not ours
    special = {"pad_token": "[PAD]", "eos_token": "[END]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(str(out))
    return out


@pytest.mark.slow
def test_a_language_model_reads_and_writes(folder: Path, tmp_path: Path) -> None:
    lines = [f"the price of {what} {how} {when}" for what in ("wheat", "oil", "gold")
             for how in ("rose", "fell") for when in ("again", "")] * 4  # fmt: skip
    (tmp_path / "a.csv").write_text("\n".join(["text", *lines]))
    experiment = ft.Experiment(
        {
            "fedem": ft.FedEM(components=2, trainable="lora", rank=2),
            "fedsdg": ft.FedSDG(rank=2),
        },
        rounds=1,
        data=ft.DataConfig(path=str(tmp_path / "a.csv"), task="causal-lm", max_length=8),
        split=ft.SplitConfig(2, min_examples=2),
        model=ft.ModelConfig(str(folder)),
    )
    run = ft.run(experiment, tmp_path / "run")
    out = export_model(run, "fedem", tmp_path / "out", client=1)
    texts = ["the price of oil", "gold rose again"]
    command = [sys.executable, "-I", "-c", _CODE, str(out), *texts]
    subprocess.run(command, check=True, capture_output=True)
    batch, logits, written, full = torch.load(f"{out}.pt", weights_only=True)
    assert batch["input_ids"].tolist() == [[2, 3, 4, 6], [7, 8, 10, 0]]
    trained: Any = open_trained(run, "fedem")
    ours: dict[str, Any] = {**batch, "attention_mask": batch["attention_mask"].float()}
    with torch.no_grad():
        expected = trained.method.predict(trained.task, trained.client_state(1), ours)
    np.testing.assert_allclose(logits[:, :3].numpy(), expected[:, :3].numpy(), atol=1e-5)
    assert written.startswith("the price of oil")
    assert full == texts[0]  # four tokens, as many as the model reads then, so it is not called
    adapter = export_model(run, "fedsdg", tmp_path / "adapter", client=1)
    said: list[list[int]] = []
    for end in (0, None):  # the second token that is written, next
        number = str(said[0][5] if end is None else end)
        command = [sys.executable, "-I", "-c", _WRITES, str(adapter), texts[0], number]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        said = json.loads(done.stdout)
        assert said[0] == said[1]  # with and without a cache
        assert said[2] == said[3]
    assert len(said[0]) == 10
    assert len(said[2]) < 10
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert (config["r"], config["task_type"]) == (4, "CAUSAL_LM")  # two branches of rank 2
    command = f"vllm serve {folder} --enable-lora --max-lora-rank 8 --lora-modules 1=."
    assert command in (adapter / "README.md").read_text()


@pytest.mark.slow
def test_chats_are_read_as_predict_reads_them(tmp_path: Path) -> None:
    run = kinds.finished("instruct") / "run"
    out = export_model(run, "fedavg", tmp_path / "out", client="a")
    told = [{"role": "system", "content": "the ward"}, {"role": "user", "content": "is the bed"}]
    more = [told[1], {"role": "assistant", "content": "night"}, told[1]]
    with (tmp_path / "asked.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["system", "prompt", "input"])
        rows.writerow(["the ward", "is the bed", ""])
        rows.writerow(["", "is", "the bed"])
        rows.writerow(["", json.dumps(more), ""])
        rows.writerow(["the ward", str([told[1], more[1]]), ""])  # as pandas writes it, answered
    asked = [json.dumps(told), "is\n\nthe bed", json.dumps(more), json.dumps(told)]
    model = ft.load_model(run, "fedavg", "a")

    def use(given: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "use.py", given]
        return subprocess.run(command, cwd=out, capture_output=True, text=True, check=False)

    expected = [" ".join(text.split("\n")) for text in model.predict(asked)]
    done = use(str(tmp_path / "asked.csv"))
    assert (done.stdout.splitlines(), done.stderr) == (expected, "")
    done = use("bed " * 40)
    assert (done.returncode, done.stdout) == (2, "")
    assert "a conversation of 42 tokens, and the model reads 40" in done.stderr
    data = ft.DataConfig(
        path="asked.csv", task="instruct", client="client", text_pair="input",
        templates=(Template(("a",), "is {input} {prompt}"),),
    )  # fmt: skip
    about = json.loads((out / "export.json").read_text())
    assert _prompts(data, "b", about["chat"])["chat"]["context"] == ["input"]
    (out / "export.json").write_text(json.dumps(about | _prompts(data, "a", about["chat"])))
    (tmp_path / "asked.csv").write_text("input,prompt\nthe bed,night\n")
    done = use(str(tmp_path / "asked.csv"))
    assert done.stdout.splitlines() == [
        " ".join(model.predict(["is the bed night"])[0].split("\n"))
    ]
    (tmp_path / "asked.csv").write_text("input\nthe bed\n")
    done = use(str(tmp_path / "asked.csv"))
    assert (done.returncode, done.stdout) == (2, "")
    assert "it has no column 'prompt', but input" in done.stderr
