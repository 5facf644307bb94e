"""Pairs of texts from a table to an export, with every executor."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertTokenizerFast

import fedtailor as ft
from fedtailor.cli.main import main
from fedtailor.runs.trained import open_trained
from tests import kinds
from tests.models.small import SEQUENCE, save

PLACES = ["a room", "the ward", "a bed", "the lift", "the hall"]
COLUMNS = "sentence1", "sentence2", "label", "site"


def save_tokenizer(folder: Path) -> None:
    """One of the words of these texts, which marks the second text's tokens."""
    words = f"[PAD] [CLS] [SEP] [UNK] This is And that too {' '.join(PLACES)} . ,".split()
    numbers = {word: number for number, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    BertTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]",
    ).save_pretrained(folder)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A table whose label depends on both texts, a tiny encoder with token types, an experiment."""
    save(tmp_path / "model", kinds.LARGE, SEQUENCE)
    save_tokenizer(tmp_path / "model")
    rng = np.random.default_rng(0)
    rows = []
    for number in range(60):
        first, second = rng.choice(PLACES, 2)
        label = "same" if first == second else "other"
        rows.append([f"This is {first}.", f"And that is {second}, too", label, "ab"[number % 2]])
    with (tmp_path / "pairs.csv").open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS, *rows])
    (tmp_path / "e.toml").write_text("""
rounds = 2
data.path = "pairs.csv"
data.client = "site"
split.scheme = "natural"
model.name = "model"
[methods.fedsdg]
[methods.fedavg]
""")
    return tmp_path


@pytest.mark.long
def test_from_a_table_to_an_export(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main(["run", "e.toml", "--out", "run"]) == 0, capsys.readouterr().err
    assert main(["run", "e.toml", "--out", "v", "--set", "engine.executor=vectorised"]) == 0
    for method in ("fedsdg", "fedavg"):
        one, other = (open_trained(run, method).global_state() for run in ("run", "v"))
        assert one.keys() == other.keys()
        for name, value in one.items():
            np.testing.assert_allclose(value, other[name], rtol=1e-4, atol=1e-6)
    capsys.readouterr()
    of = ["run", "--method", "fedavg", "--client", "a"]
    assert main(["predict", *of, "--input", "pairs.csv"]) == 0
    captured = capsys.readouterr()
    header, *lines = captured.out.splitlines()
    assert header == "label,probability,p(other),p(same)"
    assert "of 60 rows are right" in captured.err
    with Path("pairs.csv").open() as file:
        rows = list(csv.DictReader(file))
    pairs = [(row["sentence1"], row["sentence2"]) for row in rows]
    model = ft.load_model("run", "fedavg", "a")
    found = model.predict(pairs)
    assert [f"{one.probability:.6f}" for one in found] == [
        f"{float(line.split(',')[1]):.6f}" for line in lines
    ]
    swapped = model.predict([(b, a) for a, b in pairs])
    assert found[0].probability != swapped[0].probability
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["predict", *of, "--input", "pairs.jsonl"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == lines
    Path("one.csv").write_text("sentence1\nThis is a room.\n")
    Path("one.txt").write_text("This is a room.\n")
    for name, message in (("one.csv", "no column 'sentence2'"), ("one.txt", "reads pairs")):
        capsys.readouterr()
        assert main(["predict", *of, "--input", name]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(ft.InputError, match="pairs of texts"):
        model.predict(["This is a room."])
    assert main(["export", *of, "--out", "out"]) == 0, capsys.readouterr().err
    run = [sys.executable, "use.py", "../pairs.csv"]
    used = subprocess.run(run, cwd="out", capture_output=True, text=True, check=False)
    assert used.returncode == 0, used.stderr
    said = [line.split("  ") for line in used.stdout.splitlines()]
    expected = [[f"{one.probability:.3f}", one.label] for one in found]
    assert said == [[*a, " | ".join(b)] for a, b in zip(expected, pairs, strict=True)]
    Path("none.csv").write_text("sentence1,sentence2\n")
    refused = {
        "This is a room.": "reads pairs of texts",
        "../none.csv": "has no rows",
        "../pairs.jsonl": "give a .csv file with the columns 'sentence1' and 'sentence2'",
    }
    for given, why in refused.items():
        run = [sys.executable, "use.py", given]
        used = subprocess.run(run, cwd="out", capture_output=True, text=True, check=False)
        assert used.returncode == 2
        assert why in used.stderr


@pytest.mark.slow
def test_a_pair_is_said_before_the_run_and_refused_for_a_task_of_one_text(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    command = ["run", "e.toml", "--out", "run"]
    assert main([*command, "--dry-run"]) == 0
    assert "an input is a pair: 'sentence1' and 'sentence2'" in "".join(capsys.readouterr())
    assert main([*command, "--set", "data.task=causal-lm"]) == 2
    assert "are a pair of texts, and the task 'causal-lm' reads one" in capsys.readouterr().err
