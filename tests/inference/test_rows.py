"""Rows in, rows out."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from datasets import ClassLabel, Features, Value
from datasets import Dataset as Table

from fedtailor.data.config import DataConfig
from fedtailor.errors import InputError
from fedtailor.inference.rows import (
    Rows,
    accuracy,
    as_csv,
    as_objects,
    check_kept,
    class_numbers,
    clients_of,
    empty_texts,
    of_others,
    read_rows,
)
from fedtailor.objectives import DEFAULT, CausalLM
from fedtailor.objectives.classification import Prediction

DATA = DataConfig(path="train.csv")


def table(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_csv_jsonl_and_txt_give_the_same_texts(tmp_path: Path) -> None:
    texts = ["one, two", 'say "a"\nb']
    made = table(tmp_path / "a.csv", '\ufefftext,label\n"one, two",x\n"say ""a""\nb",y\n')
    assert read_rows(made, DATA, images=False) == Rows(texts, ["x", "y"])
    tabs = table(tmp_path / "a.tsv", 'text\tlabel\none, two\tx\n"say ""a""\nb"\ty\n')
    assert read_rows(tabs, DATA, images=False) == Rows(texts, ["x", "y"])
    lines = table(tmp_path / "a.jsonl", '{"text": "one, two"}\n\n{"text": "say \\"a\\"\\nb"}\n')
    assert read_rows(lines, DATA, images=False) == Rows(texts)
    plain = table(tmp_path / "a.txt", "one, two\nsay\n")
    assert read_rows(plain, DATA, images=False) == Rows(["one, two", "say"])
    other = table(tmp_path / "b.csv", "note,diagnosis\nfever,flu\n")
    named = DataConfig(path="train.csv", text="words", label="diagnosis")
    assert read_rows(other, named, images=False, text="note") == Rows(["fever"], ["flu"])


def test_every_file_that_training_reads_is_read(tmp_path: Path) -> None:
    data = DataConfig(path="train.csv", client="user")
    rows = [{"text": "one", "label": "x", "user": "a"}, {"text": "", "label": None, "user": "b"}]
    expected = Rows(["one", ""], ["x", ""], ["a", "b"])
    leaf = {u: {"x": [r["text"]], "y": [r["label"]]} for r in rows for u in [r["user"]]}
    (tmp_path / "leaf").mkdir()
    files = {
        "rows.json": rows, "by_user.json": {row["user"]: [row] for row in rows},
        "leaf/a.json": {"users": [*leaf], "user_data": leaf},
    }  # fmt: skip
    for name, content in files.items():
        table(tmp_path / name, json.dumps(content))
    Table.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    for name in (*files, "leaf", "rows.parquet"):
        assert read_rows(str(tmp_path / name), data, images=False) == expected, name
    assert read_rows(str(tmp_path / "leaf"), data, images=False).table == [
        {"text": row["text"], "label": row["label"], "user": row["user"]} for row in rows
    ]
    with pytest.raises(InputError, match=r"rows.json has texts, and this model reads pictures"):
        read_rows(str(tmp_path / "rows.json"), data, images=True)
    pictures = {"users": ["a"], "user_data": {"a": {"x": [[0, 0.5, 1, 1]], "y": [3]}}}
    read = read_rows(table(tmp_path / "p.json", json.dumps(pictures)), data, images=True)
    assert read.are_pictures
    assert read.inputs[0].tolist() == [[[0, 128], [255, 255]]]
    assert (read.labels, read.clients) == (["3"], ["a"])


def test_a_line_ends_at_a_line_feed_alone(tmp_path: Path) -> None:
    texts = ["one\u2028two", "a\x0cb\x85c", "", "end"]
    plain = tmp_path / "a.txt"
    plain.write_bytes("\r\n".join(texts).encode())
    assert read_rows(str(plain), DATA, images=False).inputs == texts
    cells = tmp_path / "a.csv"
    cells.write_bytes(b'text\r\n"one\r\ntwo"\r\nthree\r\n')
    assert read_rows(str(cells), DATA, images=False).inputs == ["one\r\ntwo", "three"]
    lines = table(tmp_path / "a.jsonl", '{"text": "one\u2028two"}\n{"text": "b\x85c"}\n')
    assert read_rows(lines, DATA, images=False).inputs == ["one\u2028two", "b\x85c"]


def piped(given: str | bytes) -> io.TextIOWrapper:
    """Standard input, with that text or these bytes."""
    return io.TextIOWrapper(io.BytesIO(given if isinstance(given, bytes) else given.encode()))


@pytest.mark.parametrize(
    ("given", "text", "expected"),
    [
        ("one\ntwo\n", None, ["one", "two"]),
        ('\ufeff{"text": "one"}\n', None, ["one"]),
        ("\ufeffnote\none\n", "note", ["one"]),
        ('{"text": "one"}\n', None, ["one"]),
        ("note\none\n", "note", ["one"]),
    ],
)
def test_stdin_has_a_text_a_line_objects_or_a_csv(
    given: str, text: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", piped(given))
    assert read_rows("-", DATA, images=False, text=text).inputs == expected
    monkeypatch.setattr("sys.stdin", piped(b"caf\xe9\n"))
    with pytest.raises(InputError, match="stdin is not in UTF-8"):
        read_rows("-", DATA, images=False, text=text)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "text,label\n", "a.csv has no rows; give at least one row"),
        ("a.csv", "", "a.csv has no rows; give at least one row"),
        ("a.csv", "note\nx\n", "no column has a usual name for --text of .*; columns: note"),
        ("a.csv", "text,label\nx\n", "row 1 has not as many fields as the header"),
        ("a.csv", 'text,label\nx,a\n"x"y,b\n', "as a csv file: line 3: ',' expected after"),
        ("a.jsonl", '{"text": 3}\n', "row 1: 'text' is 3, not a text"),
        ("a.jsonl", "[]\n", r"line 1 is not a JSON object"),
        ("a.jsonl", "{\n", r"line 1 is not a JSON object"),
        ("a.jsonl", '{"text": "a", "text": "b"}\n', r"line 1 has the key 'text' twice"),
        ("a.xlsx", "x", r"reads texts; allowed: .csv, .tsv, .jsonl, .txt, .json, .parquet, .arrow"),
        ("a.txt", "", "a.txt is empty; write one text a line into it"),
    ],
)
def test_what_cant_be_read_is_said_in_one_line(
    name: str, content: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        read_rows(table(tmp_path / name, content), DATA, images=False)


def test_stdin_has_conversations_as_files_have(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "where"}]
    parts = {"system": "be brief", "prompt": "where"}
    monkeypatch.setattr("sys.stdin", piped(f"{json.dumps({'messages': turns})}\n" * 2))
    data = DataConfig(path="chats.jsonl", task="instruct")
    whole = read_rows("-", data, images=False).inputs
    assert list(map(json.loads, whole)) == [turns, turns]
    monkeypatch.setattr("sys.stdin", piped(json.dumps(parts)))
    drafted = DataConfig(path="chats.jsonl", task="instruct", text="prompt", label="response")
    assert read_rows("-", drafted, images=False).inputs == whole[:1]


@pytest.mark.parametrize(("task", "label"), [("instruct", "response"), ("preference", "chosen")])
def test_a_prompt_needs_no_second_text(
    task: str, label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = "rejected" if task == "preference" else "input"
    data = DataConfig(path="rows", task=task, text="prompt", text_pair=second, label=label)
    plain = table(tmp_path / "a.txt", "where\n")
    assert read_rows(plain, data, images=False) == Rows(["where"])
    monkeypatch.setattr("sys.stdin", piped("where\n"))
    assert read_rows("-", data, images=False) == Rows(["where"])
    Table.from_list([{"prompt": "where"}]).to_parquet(tmp_path / "a.parquet")
    for made in (table(tmp_path / "a.csv", "prompt\nwhere\n"), str(tmp_path / "a.parquet")):
        (told,) = map(json.loads, read_rows(made, data, images=False).inputs)
        said = told["prompt"] if task == "preference" else told
        assert said == [{"role": "user", "content": "where"}]


def test_numbers_that_a_file_names_are_labels_by_name(tmp_path: Path) -> None:
    rows = Table.from_dict(
        {"text": ["a", "b"], "label": [1, -1], "id": [0, 1]},
        features=Features({
            "text": Value("string"), "label": ClassLabel(names=["good", "bad"]),
            "id": ClassLabel(names=["x", "y"]),
        }),
    )  # fmt: skip
    rows.to_parquet(tmp_path / "a.parquet")
    data = DataConfig(path="train.csv", classes=("bad", "good"), client="id")
    read = read_rows(str(tmp_path / "a.parquet"), data, images=False)
    assert read == Rows(["a", "b"], ["bad", "-1"], ["0", "1"])
    assert class_numbers(read.labels or (), data.classes) == [0, -1]


def test_pictures_are_a_folder_or_one_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no pictures; allowed: .png"):
        read_rows(str(tmp_path), DATA, images=True)
    (tmp_path / "b.PNG").touch()
    (tmp_path / "a").mkdir()
    (tmp_path / "a/c.jpg").touch()
    expected = [tmp_path / "a/c.jpg", tmp_path / "b.PNG"]
    assert read_rows(str(tmp_path), DATA, images=True).inputs == expected
    assert read_rows(str(expected[0]), DATA, images=True).are_pictures
    with pytest.raises(InputError, match="no file 'nothing'"):
        read_rows("nothing", DATA, images=True)


PREDICTIONS = [
    Prediction("a", 0.75, {"a": 0.75, "b": 0.25}),
    Prediction("b", 1.0, {"a": 0, "b": 1}),
]


def test_labels_are_names_or_numbers_of_classes() -> None:
    assert accuracy(PREDICTIONS, ["a", "0"], ["a", "b"]) == "accuracy 50.0 %: 1 of 2 rows are right"
    assert accuracy(PREDICTIONS, ["", "1"], ["a", "b"]) == "accuracy 100.0 %: 1 of 1 rows are right"
    assert accuracy(PREDICTIONS, ["", " "], ["a", "b"]) == "no row has a label"
    assert accuracy(PREDICTIONS, ["a", "c"], ["a", "b"]) == (
        "accuracy 100.0 %: 1 of 1 rows are right; 1 row has a label that the model does not know, "
        "left out: 'c'; it knows a, b"
    )
    assert accuracy(PREDICTIONS, ["d", "c"], ["a", "b"]) == (
        "no row has a label that the model knows; 2 rows have labels that the model does not know, "
        "left out: 'd', 'c'; it knows a, b"
    )


def test_results_are_lines_of_csv_or_json() -> None:
    of_files = list(as_objects(Rows([Path("x,.png"), Path("y.png")]), PREDICTIONS, DEFAULT))
    assert list(as_csv(of_files)) == [
        "file,label,probability,p(a),p(b)", '"x,.png",a,0.75,0.75,0.25', "y.png,b,1.0,0,1",
    ]  # fmt: skip
    assert list(as_csv(as_objects(Rows(["x"]), ["so, on"], CausalLM()))) == ["text", '"so, on"']


def test_the_output_keeps_the_columns_that_are_named(tmp_path: Path) -> None:
    made = table(tmp_path / "a.csv", "id,text,label\n17,one,a\n18,two,b\n")
    rows, own = read_rows(made, DATA, images=False), DEFAULT.column_names(["a", "b"])
    check_kept(rows, ["id"], made, own)
    kept = list(as_csv(as_objects(rows, PREDICTIONS, DEFAULT, kept=["id"])))
    assert kept[0] == "id,label,probability,p(a),p(b)"
    assert [line.partition(",")[0] for line in kept[1:]] == ["17", "18"]
    with pytest.raises(InputError, match=r"unknown column .no. in .*a\.csv.* columns: id, "):
        check_kept(rows, ["no"], made, own)
    with pytest.raises(InputError, match=r"--keep label: .* of its own .*; rename it"):
        check_kept(rows, ["label"], made, own)
    with pytest.raises(InputError, match="--keep client: the output has a column of its own with"):
        check_kept(Rows(["one"], table=[{"client": "x"}]), ["client"], "-", {"label", "client"})
    uneven = table(tmp_path / "a.jsonl", '{"text": "one", "id": 1}\n{"text": "two"}\n')
    with pytest.raises(InputError, match=r"a\.jsonl, row 2 has no 'id'; add it to the row, or"):
        check_kept(read_rows(uneven, DATA, images=False), ["id"], uneven, own)
    with pytest.raises(InputError, match="--keep: - has no columns; it takes a csv or jsonl file"):
        check_kept(Rows(["one"]), ["id"], "-", own)


def test_empty_texts_are_counted() -> None:
    assert empty_texts(Rows(["a", "b"])) == ""
    assert empty_texts(Rows(["", "b"])).endswith("says nothing: 1 row")
    assert empty_texts(Rows(["", " \t"])).endswith("says nothing: 2 rows")


def test_rows_of_other_clients_are_counted_with_both_names() -> None:
    rows = Rows(["a", "b", "c"], clients=["1.0", "", "1.0"])
    text = "2 of 3 rows are of other clients than '1', whose model predicts them all: '1.0' (2); "
    assert of_others(rows, "1", ["1", "2"]).startswith(text)
    assert of_others(rows, "0", ["oslo", "rome"]).startswith(text.replace("'1',", "'oslo',"))
    assert of_others(Rows(["a"], clients=["oslo"]), "0", ["oslo"]) == ""
    assert of_others(Rows(["a"]), "oslo", ["oslo"]) == ""
    assert of_others(rows, "0", None) == ""


def test_a_number_is_no_position_where_classes_are_numbers() -> None:
    assert class_numbers(["2", "1"], ["1", "2"]) == [1, 0]
    assert class_numbers(["1", "a"], ["a", "b"]) == [1, 0]
    assert class_numbers(["0"], ["1", "2"]) == [-1]
    assert class_numbers(["1", "7"], ["7", "other"]) == [-1, 0]
    assert class_numbers(["010", "10", "1"], ["010", "10"]) == [0, 1, -1]


def test_rows_name_their_clients(tmp_path: Path) -> None:
    data = DataConfig(path="train.csv", client="ward")
    made = table(tmp_path / "a.csv", "text,ward\none, oslo \ntwo,7\n")
    rows = read_rows(made, data, images=False)
    names = ["7", "oslo"]
    assert clients_of(rows, made, data, names) == ["oslo", "7"]
    with pytest.raises(InputError, match=r"clients are not those of column 'ward' .split"):
        clients_of(rows, made, data, None)
    results = [Prediction("x", 1.0, {"x": 1.0})] * 2
    assert [o["client"] for o in as_objects(rows, results, DEFAULT, rows.clients)] == ["oslo", "7"]
    with pytest.raises(InputError, match=r"no column of clients .data\.client.; use --client"):
        clients_of(rows, made, DATA, names)
    other = table(tmp_path / "b.csv", "text\none\n")
    with pytest.raises(InputError, match=r"b\.csv has no column 'ward'"):
        clients_of(read_rows(other, data, images=False), other, data, names)
    empty = table(tmp_path / "c.csv", "text,ward\none,oslo\ntwo,\n")
    with pytest.raises(InputError, match=r"c\.csv, row 2: 'ward' is empty"):
        clients_of(read_rows(empty, data, images=False), empty, data, names)


def test_whole_numbers_are_labels_however_they_are_spelt() -> None:
    assert class_numbers(["1.0", "-1", "", "+1"], ["-1", "1"]) == [1, 0, -1, 1]
    assert class_numbers(["0"], ["-1", "1"]) == [-1]  # it is no class's number
