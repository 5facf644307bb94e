"""Files that programs for spreadsheets write are read, or refused in one line; what cells mean."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import pytest

from fedtailor.data.config import DataConfig
from fedtailor.data.sources import load_data
from fedtailor.data.survey import survey
from fedtailor.data.table import Dataset
from fedtailor.data.tables import local_table
from fedtailor.errors import InputError
from fedtailor.inference.rows import read_rows


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "note,label\ncaf\u00e9,ok\n".encode("latin-1"), "not UTF-8; save it as UTF-8"),
        ("a.csv", "note,label\ncaf\u00e9,ok\n".encode("utf-16"), "not UTF-8; save it as UTF-8"),
        ("a.jsonl", '{"note": "caf\u00e9"}\n'.encode("latin-1"), "not UTF-8; save it as UTF-8"),
        ("a.csv", b"PK\x03\x04 cut short", "it is an Excel file or a zip archive"),
    ],
)
def test_a_file_that_cannot_be_read_is_told_once(
    tmp_path: Path,
    name: str,
    content: bytes,
    message: str,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with caplog.at_level(logging.ERROR), pytest.raises(InputError, match=message) as caught:
        local_table(str(path))
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""
    assert not caplog.records


@pytest.mark.parametrize(("separator", "suffix"), [(";", "csv"), ("\t", "csv"), ("\t", "tsv")])
def test_cells_may_be_separated_by_semicolons_or_tabs(
    tmp_path: Path, separator: str, suffix: str
) -> None:
    path = tmp_path / f"a.{suffix}"
    rows = [("id", "note", "label"), ("1", "clean, kind, caf\u00e9", "ok")]
    path.write_text("\r\n".join(map(separator.join, rows)), encoding="utf-8-sig")
    table = local_table(str(path))
    assert list(table) == [{"id": "1", "note": "clean, kind, caf\u00e9", "label": "ok"}]


def test_other_separators_inside_cells_are_text(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("\ufeffnote,label\nclean; kind; quiet\u00e9,ok\n", encoding="utf-8")
    assert local_table(str(path))[0]["note"] == "clean; kind; quiet\u00e9"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.csv",
            "text,label\na,b\nc,d,e\n",
            "line 3 has 3 cells, and the lines before it 2; is a separator",
        ),
        (
            "a.csv",
            'text,label\n"a\n\n",b\nc,d,e\n',
            "line 5 has 3 cells, and the lines before it 2",
        ),
        ("a.csv", 'text,label\na,b\n"c,d\n', "the quote that opens in row 2 after the header is"),
        (
            "a.jsonl",
            '{"text": "a"}\nno\n',
            "line 2 is not a JSON object: 'no'; write one object in each line",
        ),
        (
            "a.jsonl",
            '{"text": "a"}\n\n{"text": \n{"text": "b"}\n',  # pandas names no line
            """line 3 is not a JSON object: '{"text":'; write one object in each line""",
        ),
        ("a.jsonl", '{"text": "a"}\n["b"]\n', """line 2 is not a JSON object: '["b"]'; write"""),
        (
            "a.jsonl",
            '{"a": 1}\n{"text": "b", "text": "c"}\n',
            "line 2 has the key 'text' twice; leave one out",
        ),
        (
            "a.json",
            '{"text": "a"}\n{"text": \n',
            "line 2 is not a JSON object: '{\"text\":'; write",
        ),
        ("a.parquet", "no parquet file", "it is no whole parquet file; write or copy it again"),
        ("a.arrow", "no arrow file at all", "it is no whole Arrow file; write or copy it again"),
    ],
)
def test_what_readers_say_is_told_in_plain_words(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError) as caught:
        local_table(str(tmp_path / name))
    assert str(caught.value).startswith(f"can't read {str(tmp_path / name)!r}: {message}")
    assert "\n" not in str(caught.value)


def write(path: Path, *rows: str) -> str:
    path.write_text("text,label,site\n" + "".join(f"{row}\n" for row in rows), encoding="utf-8")
    return str(path)


def load(path: str, tokenizer, **settings) -> Dataset:
    config = DataConfig(path=path, max_length=8, client="site", **settings)
    return load_data(config, tokenizer)


def test_words_that_pandas_takes_for_gaps_are_words(tokenizer, tmp_path: Path) -> None:
    rows = ("a b,None,NA", "NA,mild,oslo", "e f,severe,null", "g h,,nan")
    path = write(tmp_path / "a.csv", *rows)
    dataset = load(path, tokenizer)
    assert dataset.classes == ("None", "mild", "severe")
    assert dataset.client_names == ("NA", "nan", "null", "oslo")
    assert {one.kind for one in dataset.omissions} == {"no-label", "label-like-none"}
    word = tokenizer("NA")["input_ids"]
    assert dataset.batch(np.array([1]))["input_ids"][0].tolist()[: len(word)] == word
    found = survey(path)
    assert (found.column("label").missing, found.column("site").missing) == (1, 0)
    assert found.column("label").distinct == 3
    assert read_rows(path, DataConfig(path=path), images=False).inputs[1] == "NA"


@pytest.mark.slow
def test_clients_keep_the_spelling_of_their_names(tokenizer, tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "a b,0,007", "c d,1,7", "e f,1,10")
    assert load(path, tokenizer).client_names == ("007", "10", "7")
    assert survey(path).counts("site") == {"007": 1, "7": 1, "10": 1}
    plain = write(tmp_path / "b.csv", "a b,0,10", "c d,1,7", "e f,1,7")
    dataset = load(plain, tokenizer)
    assert (dataset.client_names, dataset.groups.tolist()) == (("7", "10"), [1, 0, 0])
    both = load(plain, tokenizer, test_path=path)
    assert both.client_names == ("007", "10", "7")


@pytest.mark.parametrize(
    ("labels", "classes", "expected"),
    [
        (["0", "2", ""], (), ["0", "2"]),  # class numbers, beside an empty cell
        (["00", "02", "1"], (), ["0", "2", "1"]),
        (["010", "10", "20"], (), ["010", "10", "20"]),  # two codes
        (["1", "2", "NA"], (), ["1", "2", "NA"]),
        (["1", "2", "2"], ("1", "2", "NA"), ["1", "2", "2"]),  # a file that lacks one of them
        (["1", "0", "0"], ("no", "yes"), ["yes", "no", "no"]),
        (["9007199254740993000", "9007199254740992000", "1"], (), None),  # of many digits: texts
        (["True", "False", "True"], (), ["True", "False", "True"]),
    ],
)
def test_labels_are_class_numbers_or_names(
    labels: list[str],
    classes: tuple[str, ...],
    expected: list[str] | None,
    tokenizer,
    tmp_path: Path,
) -> None:
    rows = [f"a b {number},{label},x" for number, label in enumerate(labels)]
    dataset = load(write(tmp_path / "a.csv", *rows), tokenizer, classes=classes)
    assert [dataset.classes[label] for label in dataset.labels] == (expected or labels)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["a b,0.5,x", "c d,1.5,x"], "holds 0.5: numbers to predict need another task"),
        (["12,0,x", "13,1,x"], "column 'text' holds numbers or nothing, not text"),
        (["a b,0,x,1", "c d,1,y,2"], "row 1 has more fields than the header"),
    ],
)
def test_what_a_csv_cant_mean(rows: list[str], message: str, tokenizer, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        load(write(tmp_path / "a.csv", *rows), tokenizer)


def test_a_column_that_stands_twice_is_refused(tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,label,label,site,\na b,0,1,x,\n")
    with pytest.raises(InputError, match="two columns are named 'label'; rename one"):
        load(str(path), tokenizer)
    path.write_text("text,label,site,,\na b,0,x,,\nc d,1,y,,\n")
    assert len(load(str(path), tokenizer).labels) == 2


def test_a_file_of_the_same_time_and_size_is_read_anew(tokenizer, tmp_path: Path) -> None:
    rows = ("a b,x,1", "c d,y,2")
    path = Path(write(tmp_path / "a.csv", *rows))
    assert load(str(path), tokenizer).classes == ("x", "y")
    times = path.stat()
    write(path, *(row.replace("x", "z") for row in rows))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert load(str(path), tokenizer).classes == ("y", "z")


@pytest.mark.slow
def test_very_many_columns_are_read(tokenizer, tmp_path: Path) -> None:
    more = ",".join(f"c{number}" for number in range(200))
    rows = [f"good word,{label},oslo,{','.join('1' * 200)}" for label in "xyxy"]
    path = tmp_path / "wide.csv"
    path.write_text("\n".join([f"text,label,site,{more}", *rows]) + "\n")
    assert load(str(path), tokenizer).classes == ("x", "y")
    assert len(survey(str(path)).columns) == 203
    with pytest.raises(InputError, match="no column 'c200'"):
        load(str(path), tokenizer, label="c200")
