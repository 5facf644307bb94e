"""CoNLL files: a word and its tag in each line, and an empty line between sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from ..errors import InputError, brief

SUFFIXES = (".conll", ".bio", ".iob", ".iob2")

_DOCUMENT = "-DOCSTART-"
_TAG = re.compile(r"O|[BIESLUM]-\S+")  # of the schemes IOB and BILOU
_BLANKS = " \t\r\n"
_LINES = 1000  # from which a txt file is recognised


def looks_like_conll(path: Path) -> bool:
    """Whether a file, of any suffix, has words with tags as ``B-PER`` and ``O`` in its lines."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="\n") as file:
        lines = [columns for _, columns in _lines(islice(file, _LINES)) if columns]
    is_document = bool(lines) and lines[0][0] == _DOCUMENT
    tags = {columns[-1] for columns in lines if len(columns) > 1}
    are_tags = "O" in tags and all(map(_TAG.fullmatch, tags))
    return is_document or (are_tags and all(len(columns) > 1 for columns in lines))


def conll_table(path: Path, name: str) -> Any:
    """Read a CoNLL file as a ``datasets.Dataset`` of sentences.

    A line has columns with blanks or a tab between them: first the word, last its tag. The columns
    of the table are ``tokens`` and ``tags``, lists of texts, and ``document``, counted from 1, if
    lines with ``-DOCSTART-`` begin documents. Comments, ``# ...`` before a sentence, are left out.
    Raises InputError where a line has no tag or other columns than the first, or there is no
    sentence."""
    from datasets import Dataset, Features, List, Value

    table: dict[str, list[Any]] = {"tokens": [], "tags": [], "document": []}
    document = expected = 0
    is_new = True
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        for number, columns in _lines(file):
            if not columns or columns[0] == _DOCUMENT:
                document += bool(columns)
                is_new = True
                continue
            expected = expected or len(columns)
            _check(columns, expected, f"{name}, line {number}")
            if is_new:
                for column, value in (("tokens", []), ("tags", []), ("document", document)):
                    table[column].append(value)
                is_new = False
            table["tokens"][-1].append(columns[0])
            table["tags"][-1].append(columns[-1])
    if not table["tokens"]:
        raise InputError(f"{name!r} has no sentences; write a word and its tag in each line")
    words = List(Value("string"))
    kinds = {"tokens": words, "tags": words, "document": Value("int64")}
    if not document:
        del table["document"], kinds["document"]
    return Dataset.from_dict(table, features=Features(kinds))


def _lines(file: Iterator[str]) -> Iterator[tuple[int, list[str]]]:
    """The columns of each line, after its number; none of a blank line."""
    is_new = True
    for number, line in enumerate(file, 1):
        text = line.strip(_BLANKS)
        # other blanks than spaces, such as U+00A0, are part of a word
        cells = text.split("\t") if "\t" in text else filter(None, text.split(" "))
        columns = [cell.strip(" ") for cell in cells]
        is_comment = text.startswith("# ") and not _TAG.fullmatch(columns[-1])
        if not (is_new and is_comment):
            is_new = not text or columns[0] == _DOCUMENT
            yield number, columns


def _check(columns: list[str], expected: int, place: str) -> None:
    shown = brief(" ".join(columns), 60)
    if len(columns) < 2:
        raise InputError(
            f"{place}: {shown} is no word and its tag; each line has both, with blanks or a tab "
            "between them, and an empty line ends a sentence"
        )
    if len(columns) != expected:
        raise InputError(
            f"{place}: {shown} has {len(columns)} columns, and the lines before it {expected}; is "
            "its tag missing?"
        )
