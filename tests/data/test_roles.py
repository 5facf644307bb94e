"""Tables of a kind of task that does not exist yet are told by name, by new, run and Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fedtailor.data import Data, DataConfig
from fedtailor.data.sources import read_columns
from fedtailor.data.survey import survey
from fedtailor.errors import InputError
from tests.data.labels import encode_labels

ONE = ["the food was cold and late", "what a lovely day it is", "one more text to be read"]
TWO = ["another text with many words", "some more words to read", "nothing to say but much"]
SEVERAL, NUMBERS, LISTS = "multi-label", "regression", "lists or objects"


def outcomes(columns: dict[str, list[Any]], folder: Path, **named: str) -> list[str]:
    """What new, run and Python make of a table of 60 rows: the task of new, the classes of the
    others, or a message."""
    rows = {name: [values[i % len(values)] for i in range(60)] for name, values in columns.items()}
    frame, file = pd.DataFrame(rows), str(folder / "table.jsonl")
    frame.to_json(file, orient="records", lines=True)
    reads = (
        lambda: survey(file).roles(named.get("text"), named.get("label"), None).task,
        lambda: encode_labels(read_columns(DataConfig(path=file, **named)))[1],
        lambda: encode_labels(Data.from_pandas(frame, **named).columns)[1],  # type: ignore[arg-type]
    )
    told = []
    for read in reads:
        try:
            told.append(str(read()))
        except InputError as error:
            told.append(str(error))
    assert not any("\n" in one for one in told)
    return told


@pytest.mark.parametrize(
    ("columns", "task"),
    [
        ({"text": ONE, "late": [0, 1], "rude": [1, 0]}, "multi-label"),
        ({"text": ONE, "late": ["yes", "no"], "rude": [True, False]}, "multi-label"),
        ({"text": ONE, "label": [["a"], ["a", "b"]]}, "multi-label"),
        ({"text": ONE, "label": ["['a', 'b']", "['b']"]}, "multi-label"),
        ({"text": ONE, "label": ["a", "a|b", "b"]}, "multi-label"),
        ({"tokens": [["a", "b"]], "ner_tags": [["O", "B-X"]]}, "token-classification"),
        (
            {
                "context": ONE,
                "question": TWO,
                "answers": [{"text": [one[4:8]], "answer_start": [4]} for one in ONE],
            },
            "question-answering",
        ),
        ({"document": ONE, "summary": [f"{TWO[i % 3]} {i}" for i in range(60)]}, "seq2seq"),
    ],
)
def test_a_table_of_another_task_is_told_by_its_name(
    columns: dict[str, list[Any]], task: str, tmp_path: Path
) -> None:
    new, run, frame = outcomes(columns, tmp_path)
    assert new == task
    for told in (run, frame):
        assert "are those of another task" in told
        assert f"task = {task!r}" in told


@pytest.mark.parametrize(
    "names",
    [
        ("premise", "hypothesis"),
        ("question", "sentence"),
        ("sentence1", "sentence2"),
        ("text_a", "text_b"),
    ],
)
def test_two_columns_that_are_called_like_a_pair_are_one(
    names: tuple[str, str], tmp_path: Path
) -> None:
    table = {names[1]: TWO, names[0]: ONE, "label": [0, 1]}
    assert outcomes(table, tmp_path) == ["classification", "('0', '1')", "('0', '1')"]
    file, frame = str(tmp_path / "table.jsonl"), pd.DataFrame({k: v[:2] for k, v in table.items()})
    roles = survey(file).roles(None, None, None)
    assert (roles.source, roles.pair) == names
    for columns in (read_columns(DataConfig(path=file)), Data.from_pandas(frame).columns):
        assert columns is not None
        assert columns.read(np.arange(1)) == [(ONE[0], TWO[0])]


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ({"premise": ONE, "hypothesis": TWO, "label": [0, 1]}, {"text": "hypothesis"}),
        ({"text": ONE, "late": [0, 1], "rude": [1, 0]}, {"label": "rude"}),
        ({"text": ONE, "title": TWO, "label": [0, 1], "late": [0, 1], "rude": [1, 0]}, {}),
        ({"text": ONE, "label": ["Buffalo, NY", "New York, NY"]}, {}),
        ({"text": ONE, "label": [-1, 1]}, {}),
        ({"text": ONE, "label": [1.0, 0.0]}, {}),
    ],
)
def test_other_columns_beside_the_named_ones_change_nothing(
    columns: dict[str, list[Any]], named: dict[str, str], tmp_path: Path
) -> None:
    new, *classes = outcomes(columns, tmp_path, **named)
    assert new == "classification"
    values = columns[named.get("label", "label")]
    labels = sorted({int(v) if isinstance(v, float) else v for v in values})
    assert classes == 2 * [str(tuple(map(str, labels)))]


def test_two_columns_of_texts_without_a_usual_name_are_not_chosen_between(tmp_path: Path) -> None:
    new, *_ = outcomes({"left": ONE, "right": TWO, "label": [0, 1]}, tmp_path)
    assert "may each be the input" in new
    assert "--text" in new


def test_a_test_file_may_have_whole_numbers_as_floats(tmp_path: Path) -> None:
    """As pandas makes them; the same in a csv file, where a cell is 1.0."""
    train = pd.DataFrame({"text": ONE, "label": [-1, 1, 1]})
    test = train.assign(label=[1.0, -1.0, 1.0])
    for suffix, write in ((".parquet", "to_parquet"), (".csv", "to_csv")):
        paths = [str(tmp_path / f"{name}{suffix}") for name in ("train", "test")]
        for frame, path in zip((train, test), paths, strict=True):
            getattr(frame, write)(path, index=False)
        columns = read_columns(DataConfig(path=paths[0], test_path=paths[1]))
        numbers, names = encode_labels(columns)
        assert (names, numbers.tolist()) == (("-1", "1"), [0, 1, 1, 1, 0, 1])
    test.assign(label=[1.5, 1.0, 1.0]).to_parquet(tmp_path / "test.parquet")
    paths = [str(tmp_path / f"{name}.parquet") for name in ("train", "test")]
    with pytest.raises(InputError, match="is int64 in the training split but float64"):
        read_columns(DataConfig(path=paths[0], test_path=paths[1]))
