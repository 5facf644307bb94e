"""JSON by user: LEAF's files and folders, and rows of each user."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from fedtailor.data import DataConfig, load_data
from fedtailor.data.sources import read_columns
from fedtailor.data.survey import survey
from fedtailor.data.tables import local_table
from fedtailor.errors import InputError


def leaf(path: Path, data: dict[str, tuple[list[Any], list[Any]]]) -> Path:
    users = list(data)
    content = {
        "users": users,
        "num_samples": [len(data[user][0]) for user in users],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in data.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def pixels(channels: int = 1) -> list[float]:
    return np.linspace(0, 1, 16 * channels).tolist()


def test_leafs_pictures_are_those_of_its_users(tmp_path: Path) -> None:
    leaf(tmp_path / "set/train/a.json", {"ann": ([pixels()] * 2, [0, 1])})
    leaf(tmp_path / "set/train/b.json", {"bob": ([pixels()[::-1]] * 2, [1, 0])})
    leaf(tmp_path / "set/test/a.json", {"ann": ([pixels()], [1]), "bob": ([pixels()], [0])})
    roles = survey(str(tmp_path / "set")).roles(None, None, None)
    assert (roles.source, roles.label, roles.client) == ("image", "label", "user")
    data = load_data(DataConfig(path=str(tmp_path / "set"), client="user"))
    assert (data.num_train, len(data.inputs)) == (4, 6)
    assert data.client_names == ("ann", "bob")
    assert data.inputs.values.shape == (6, 1, 4, 4)
    right = np.rint(np.array(pixels()) * 255).astype(np.uint8)
    assert data.inputs.values[0].ravel().tolist() == right.tolist()
    assert data.inputs.values[2].ravel().tolist() == right[::-1].tolist()


def test_leafs_colours_stand_side_by_side_in_a_pixel(tmp_path: Path) -> None:
    file = leaf(tmp_path / "a.json", {"ann": ([pixels(3)], [0])})
    data = read_columns(DataConfig(path=str(file))).read(np.arange(1))
    right = np.rint(np.array(pixels(3)) * 255).reshape(4, 4, 3).transpose(2, 0, 1)
    assert np.array_equal(data[0], right)


@pytest.mark.parametrize(
    ("content", "columns", "rows"),
    [
        ({"users": ["a"], "user_data": {"a": {"x": ["hi", "ho"], "y": [0, 1]}}},
         ["text", "label", "user"], 2),
        ({"users": ["a"], "user_data": {"a": {"x": [["1", "hi"]], "y": [0]}}},
         ["x0", "x1", "label", "user"], 1),
        ({"users": ["a"], "user_data": {"a": {"x": [["hi", "ho"], ["he"]], "y": [0, 1]}}},
         ["tokens", "label", "user"], 2),
        ({"users": ["a"], "user_data": {"a": {"x": [["hi", "Bo"]], "y": [["O", "B-PER"]]}}},
         ["tokens", "tags", "user"], 1),
        ({"ann": [{"text": "hi", "label": 1}], "bob": [{"text": "ho", "label": 0}]},
         ["text", "label", "user"], 2),
        ({"ann": ["hi", "ho"], "bob": ["he"]}, ["text", "user"], 3),
        ([{"user": "ann", "text": "hi"}], ["user", "text"], 1),
    ],
)  # fmt: skip
def test_json_by_user_is_a_table(
    content: Any, columns: list[str], rows: int, tmp_path: Path
) -> None:
    file = tmp_path / "table.json"
    file.write_text(json.dumps(content))
    table = local_table(str(file))
    assert (table.column_names, len(table)) == (columns, rows)


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet"])
def test_lists_and_objects_stay_what_they_are(suffix: str, tmp_path: Path) -> None:
    answers = {"text": ["ho"], "answer_start": [3]}
    rows = [
        {"user": "ann", "tokens": ["hi", "Bo"], "pair": ["a", "b"], "answers": answers},
        {"user": "bob", "tokens": [], "pair": ["c", "d"], "answers": answers},
    ]
    file = tmp_path / f"table{suffix}"
    if suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(str(file))
    else:
        file.write_text("\n".join(map(json.dumps, rows)))
    assert list(local_table(str(file))) == rows
    file = tmp_path / "users.json"
    file.write_text(json.dumps({"ann": rows[:1], "bob": rows[1:]}))
    assert list(local_table(str(file))) == rows


def test_rows_in_lines_may_be_called_json(tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    file.write_text('{"user": "ann", "text": "hi"}\n{"user": "bob", "text": "ho"}\n')
    assert local_table(str(file))["user"][:] == ["ann", "bob"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"a": 1}', "allowed are LEAF's"),
        ("[1, 2]", "allowed are LEAF's"),
        ("{", "as JSON"),
        ("", "as JSON"),
        (100_000 * "[", "as JSON"),
        ("{}", "has no rows"),
        ('{"a": [{"user": "b"}]}', "row 0 of user 'a' is no row of this user"),
        ('{"user_data": {"a": {"x": ["hi"], "y": []}}}', "user 'a' needs lists x and y of one"),
        ('{"user_data": {"a": {"x": [[0.1, 0.2]], "y": [1]}}}', "2 values, which are no square"),
        ('{"user_data": {"a": {"x": [[0, 0, 0, 7]], "y": [1]}}}', "has pixels out of 0 to 1"),
        ('{"user_data": {"a": {"x": [{}], "y": [1]}}}', "is neither a text nor a flat list"),
        ('{"a": [{"text": "hi"}, {"text": {"b": 1}}]}', "a column has values of two types"),
    ],
)
def test_other_json_is_refused_in_one_line(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "table.json"
    file.write_text(content)
    with pytest.raises(InputError, match=message) as error:
        local_table(str(file))
    assert "\n" not in str(error.value)
