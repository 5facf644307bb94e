"""Files that programs for spreadsheets write are read, or refused in one line."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from fedtailor.data.local_files import local_table
from fedtailor.errors import InputError


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "note,label\ncaf\u00e9,ok\n".encode("latin-1"), "not UTF-8; save it as UTF-8"),
        ("a.csv", "note,label\ncaf\u00e9,ok\n".encode("utf-16"), "not UTF-8; save it as UTF-8"),
        ("a.jsonl", '{"note": "caf\u00e9"}\n'.encode("latin-1"), "not UTF-8; save it as UTF-8"),
        ("a.csv", b"note,label\na,b\na,b,c,d\n", "line 3 has 4 cells, and the lines before it 2"),
        ("a.jsonl", b"no json\n", "can't read"),
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
        local_table(str(path), tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""
    assert not caplog.records


@pytest.mark.parametrize("separator", [";", "\t"])
def test_cells_may_be_separated_by_semicolons_or_tabs(tmp_path: Path, separator: str) -> None:
    path = tmp_path / "a.csv"
    rows = [("id", "note", "label"), ("1", "clean, kind, caf\u00e9", "ok")]
    path.write_text("\r\n".join(map(separator.join, rows)), encoding="utf-8-sig")
    table = local_table(str(path), tmp_path / "cache")
    assert list(table) == [{"id": "1", "note": "clean, kind, caf\u00e9", "label": "ok"}]


def test_other_separators_inside_cells_are_text(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("\ufeffnote,label\nclean; kind; quiet\u00e9,ok\n", encoding="utf-8")
    assert local_table(str(path), tmp_path / "cache")[0]["note"] == "clean; kind; quiet\u00e9"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.csv",
            "text,label\na,b\nc,d,e\n",
            "line 3 has 3 cells, and the lines before it 2; is a separator",
        ),
        ("a.csv", 'text,label\na,b\n"c,d\n', "the quote that opens in row 2 after the header is"),
        (
            "a.jsonl",
            '{"text": "a"}\nno\n',
            "the line after row 1 is not a JSON object; write one object in each line",
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
        local_table(str(tmp_path / name), tmp_path / "cache")
    assert str(caught.value).startswith(f"can't read {str(tmp_path / name)!r}: {message}")
    assert "\n" not in str(caught.value)
