"""Text files that programs for spreadsheets write: their encoding and their separator."""

from __future__ import annotations

import codecs
import re
from pathlib import Path

from ..errors import InputError

_BLOCK = 1 << 20
_SEPARATORS = (",", ";", "\t")

_BINARY = {  # how files begin that are no text
    b"PK\x03\x04": "an Excel file or a zip archive",
    b"\xd0\xcf\x11\xe0": "an old Excel file",
    b"\x1f\x8b": "a gzip archive",
    b"PAR1": "a parquet file",
}

_REASONS = (  # how pandas and pyarrow say it, and how a reader of the file does
    (
        r"Expected (\d+) fields in line (\d+), saw (\d+)",
        "line {1} has {2} cells, and the lines before it {0}; is a separator not in quotes, or a "
        "quote left open?",
    ),
    (
        r"EOF inside string starting at row (\d+)",
        "the quote that opens in row {0} after the header is never closed; close it",
    ),
    (
        r"Buffer overflow caught",
        "a line does not end, or has far more cells than the others; put cells with separators or "
        "line ends in quotes",
    ),
    (
        r"JSON parse error: .* in row (\d+)",
        "the line after row {0} is not a JSON object; write one object in each line",
    ),
    (
        r"Parquet magic bytes not found|Parquet file size is",
        "it is no whole parquet file; write or copy it again",
    ),
    (
        r"Not an Arrow file|metadata bytes|Invalid flatbuffers",
        "it is no whole Arrow file; write or copy it again",
    ),
)


def message_of(error: BaseException) -> str:
    """Return an error's words in one line, or else its type."""
    return " ".join(str(error).split()) or type(error).__name__


def reason_of(problem: str) -> str:
    """Return what pandas or pyarrow say is wrong with a file, in words for who wrote the file.

    >>> reason_of("C error: EOF inside string starting at row 3")
    'the quote that opens in row 3 after the header is never closed; close it'
    """
    for pattern, words in _REASONS:
        if found := re.search(pattern, problem):
            return words.format(*found.groups())
    return problem


def separator_of(header: str) -> str:
    """Return what separates the cells of a csv file, by its first line: the most frequent of a
    comma, a semicolon and a tab.

    >>> separator_of("note;label"), separator_of("note")
    (';', ',')
    """
    return max(_SEPARATORS, key=header.count)


def written_lines(path: Path) -> int:
    """Count a file's lines that are not blank."""
    with path.open("rb") as file:
        return sum(not line.isspace() for line in file)


def check_text_file(path: Path, name: str) -> None:
    """Check that a csv or jsonl file is one, and in UTF-8.

    Raises:
        InputError: it is a spreadsheet or an archive; it has another encoding.
    """
    with path.open("rb") as file:
        head = file.read(4)
    for begins, what in _BINARY.items():
        if head.startswith(begins):
            raise InputError(
                f"can't read {name!r}: it is {what}, whatever its name says; save the table as "
                "text (in Excel: CSV UTF-8)"
            )
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                decoder.decode(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise InputError(
            f"can't read {name!r}: it is not UTF-8; save it as UTF-8 (in Excel: CSV UTF-8)"
        ) from None
