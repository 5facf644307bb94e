"""SQuAD's JSON has a row for each question, with the columns of the hub's data set."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from datasets import List, Value

from fedtailor.data.config import DataConfig
from fedtailor.data.survey import survey
from fedtailor.data.tables import local_table, local_tables
from fedtailor.errors import InputError

CONTEXT = "Ada wrote to Bo in Rome."
SQUAD: dict[str, Any] = {
    "version": "v2.0",
    "data": [
        {
            "title": "Letters",
            "paragraphs": [
                {
                    "context": CONTEXT,
                    "qas": [
                        {
                            "id": "56be4db0acb8001400a502ec",
                            "question": "Who wrote?",
                            "answers": [
                                {"text": "Ada", "answer_start": 0},
                                {"text": "Ada wrote", "answer_start": 0},
                            ],
                            "is_impossible": False,
                        },
                        {
                            "id": 7,
                            "question": "When?",
                            "answers": [],
                            "plausible_answers": [{"text": "Rome", "answer_start": 19}],
                            "is_impossible": True,
                        },
                    ],
                }
            ],
        },
        {
            "paragraphs": [
                {"context": "Bo.", "qas": [{"id": "c", "question": "Who?", "answers": []}]}
            ]
        },
    ],
}


def write(path: Path, content: Any) -> str:
    path.write_text(json.dumps(content))
    return str(path)


def test_squad_has_a_row_for_each_question(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    table = local_table(write(tmp_path / "a.json", SQUAD))
    assert capfd.readouterr().err == ""
    first = {"text": ["Ada", "Ada wrote"], "answer_start": [0, 0]}
    none: dict[str, list[Any]] = {"text": [], "answer_start": []}
    letters = {"title": "Letters", "context": CONTEXT}
    assert list(table) == [
        {"id": "56be4db0acb8001400a502ec", **letters, "question": "Who wrote?", "answers": first},
        {"id": "7", **letters, "question": "When?", "answers": none},
        {"id": "c", "title": "", "context": "Bo.", "question": "Who?", "answers": none},
    ]
    kinds = {"text": List(Value("string")), "answer_start": List(Value("int32"))}
    assert table.features["answers"] == kinds
    unanswered = deepcopy(SQUAD)
    unanswered["data"][0]["paragraphs"][0]["qas"].pop(0)
    path = write(tmp_path / "b.json", unanswered)
    assert local_table(path).features["answers"] == kinds  # though all lists are empty
    train, test = local_tables(str(tmp_path / "a.json"), path, DataConfig())
    assert train.features == test.features


def test_questions_may_have_no_answers_yet(tmp_path: Path) -> None:
    content = deepcopy(SQUAD)
    del content["data"][0]["paragraphs"][0]["qas"][0]["answers"]
    assert local_table(write(tmp_path / "a.json", content))["answers"][0] is None
    content["data"][0]["paragraphs"][0]["qas"].pop()
    content["data"].pop()
    table = local_table(write(tmp_path / "b.json", content))
    assert table.column_names == ["id", "title", "context", "question"]


@pytest.mark.parametrize("text", ["Ada", ["Ada"]])
def test_answers_of_users_rows_stay_what_they_are(text: Any, tmp_path: Path) -> None:
    answers = {"answer_start": [0], "text": text}
    path = write(tmp_path / "a.json", {"ann": [{"answers": answers}], "bob": [{"question": "x"}]})
    assert local_table(path)["answers"][:] == [answers, None]


def test_articles_may_be_the_clients(tmp_path: Path) -> None:
    content = {"data": 2 * [SQUAD["data"][0]] + 2 * [{**SQUAD["data"][0], "title": "More"}]}
    table = survey(write(tmp_path / "a.json", content))
    assert "title" in [column.name for column in table.client_candidates({"question", "context"})]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"paragraphs"', '"Paragraphs"', "allowed are LEAF's .* SQuAD's"),
        ('"data"', '"Data"', "allowed are LEAF's .* SQuAD's"),
        ('"title": "Letters", ', '"title": 3, ', "data.0..title is 3; SQuAD's JSON has a text"),
        ('"context": "Bo."', '"text": "Bo."', r"data\[1\].paragraphs\[0\] has no 'context'"),
        ('"qas": [{"id": "c"', '"q": [{"id": "c"', r"data\[1\].paragraphs\[0\] has no 'qas'"),
        ('"id": 7, ', "", r"data\[0\].paragraphs\[0\].qas\[1\] has no 'id'"),
        ('"id": 7, ', '"id": 7.5, ', r"qas\[1\].id is 7.5; .* has a text or a whole number there"),
        ('"question": "When?"', '"question": ["When?"]', r"qas\[1\].question is \['When\?'\]"),
        ('[{"text": "Ada", ', '[{"word": "Ada", ', r"qas\[0\].answers\[0\] has no 'text'"),
        (
            '"Ada", "answer_start": 0',
            '"Ada", "answer_start": "0"',
            "answer_start is '0'; .* whole",
        ),
        ('"Ada", "answer_start": 0', '"Ada", "answer_start": -1', "answer_start is -1"),
        ('"Ada", "answer_start": 0', '"Ada", "answer_start": 9999999999', "start is 99999"),
        ('"answers": []}]}', '"answers": "x"}]}', "answers is 'x'; SQuAD's JSON has a list"),
        ("Bo in Rome", "\\ud800", "half of a character"),
        ("]}]}]}", "]}]}", "as JSON"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "a.json"
    assert old in json.dumps(SQUAD)
    file.write_text(json.dumps(SQUAD).replace(old, new))
    with pytest.raises(InputError, match=message) as error:
        local_table(str(file))
    assert "\n" not in str(error.value)
    assert "a.json" in str(error.value)
