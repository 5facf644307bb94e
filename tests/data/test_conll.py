"""CoNLL files have a row for each sentence: its words and their tags."""

from __future__ import annotations

from pathlib import Path

import pytest
from datasets import List, Value

from fedtailor.data import DataConfig
from fedtailor.data.tables import local_table
from fedtailor.errors import InputError
from fedtailor.inference.rows import read_rows

EU = ["EU", "rejects", "calls"]
TAGS = ["B-ORG", "O", "O"]


def read(folder: Path, content: str, name: str = "a.conll") -> list[dict[str, object]]:
    (folder / name).write_text(content, encoding="utf-8", newline="")
    return list(local_table(str(folder / name)))


@pytest.mark.parametrize("name", ["a.conll", "a.bio", "a.iob", "a.iob2", "a.txt"])
def test_a_sentence_is_a_row(name: str, tmp_path: Path) -> None:
    content = "EU NNP B-ORG\nrejects VBZ O\ncalls NNS O\n\nPeter NNP B-PER\n"
    rows = [{"tokens": EU, "tags": TAGS}, {"tokens": ["Peter"], "tags": ["B-PER"]}]
    assert read(tmp_path, content, name) == rows
    table = local_table(str(tmp_path / name))
    assert table.features == {"tokens": List(Value("string")), "tags": List(Value("string"))}


@pytest.mark.parametrize(
    "content",
    [
        "EU B-ORG\nrejects O\ncalls O",
        "\n\n  \nEU\tB-ORG\nrejects\tO\ncalls\tO\n\n\n",
        "\ufeffEU   x  B-ORG \r\nrejects  x O\r\ncalls x O\r\n\r\n",
        "# id = 1\n# text\tx\nEU _ _ B-ORG\nrejects _ _ O\ncalls _ _ O\n\n# id = 2\n",
    ],
)
def test_blanks_tabs_line_ends_and_comments(content: str, tmp_path: Path) -> None:
    assert read(tmp_path, content) == [{"tokens": EU, "tags": TAGS}]


def test_documents_are_counted(tmp_path: Path) -> None:
    content = "-DOCSTART- -X- O\n\na x O\n\nb x O\n-DOCSTART- (2 two) O\n# c\nc x O\n"
    assert [row["document"] for row in read(tmp_path, content, "a.txt")] == [1, 1, 2]


def test_words_are_taken_as_they_stand(tmp_path: Path) -> None:
    words = ["New York", "a\u00a0b", "\u2028", "#tag", "#", "NA"]
    rows = read(tmp_path, "\n".join(f"{word}\tO" for word in words))
    assert rows == [{"tokens": words, "tags": ["O"] * 6}]
    assert read(tmp_path, "# O\n1 O\n") == [{"tokens": ["#", "1"], "tags": ["O", "O"]}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.conll", "EU O\nrejects\n", "line 2: 'rejects' is no word and its tag"),
        ("a.conll", "EU\tO\nrejects\t\n", "line 2: 'rejects' is no word and its tag"),
        (
            "a.conll",
            "# c\nEU N O\n\ncalls N\n",
            "line 4: 'calls N' has 2 columns, and .* 3; is",
        ),
        ("a.conll", "\n \n# c\n-DOCSTART- O\n", "has no sentences"),
        ("a.conll", "", "it is empty"),
        ("a.conll", "PK\x03\x04", "it is an Excel file or a zip archive"),
        ("a.txt", "a good day\nno O\n", "a txt file is read if its lines are words with their tag"),
    ],
)
def test_a_bad_line_is_named(name: str, content: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message) as error:
        read(tmp_path, content, name)
    assert name in str(error.value)
    (tmp_path / name).write_bytes(b"caf\xe9 O\n")
    with pytest.raises(InputError, match="it is not UTF-8"):
        local_table(str(tmp_path / name))


def test_a_txt_file_of_texts_stays_one_for_predictions(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("take bus B-12\n")
    assert read_rows(str(file), DataConfig(), images=False).inputs == ["take bus B-12"]
