"""Text files that programs for spreadsheets write: their encoding and their separator."""

from __future__ import annotations

import codecs
from pathlib import Path

from ..errors import InputError

_BLOCK = 1 << 20
_SEPARATORS = {";": "';'", "\t": "tabs"}


def check_text_file(path: Path, name: str) -> None:
    """Check that a csv or jsonl file is in UTF-8, and that commas separate the cells of a csv file.

    Raises:
        InputError: it has another encoding, or its first line another separator.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with path.open("rb") as file:
            first = decoder.decode(file.readline())
            while block := file.read(_BLOCK):
                decoder.decode(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        raise InputError(f"can't read {name!r}: it is not UTF-8; save it as UTF-8") from None
    if path.suffix != ".csv":
        return
    for separator, words in _SEPARATORS.items():
        if first.count(separator) > first.count(","):
            raise InputError(
                f"can't read {name!r}: its cells seem to be separated by {words}; save it with "
                "commas between them"
            )
