"""The random number of a trial that its server keeps to itself, and under privacy of records each
site: noise and cohorts follow from it.

Who knows it can take the noise off. So only its owner may read the file, and no message has it.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .files import read_record, write_json

_FILE = "secret.json"


@dataclass(frozen=True)
class _Record:
    """What the file says."""

    secret: str


def secret_of(folder: Path) -> str:
    """The secret of the trial in ``folder``; it is drawn the first time that it is asked for.

    Raises:
        InputError: the file is damaged.
    """
    path = folder / _FILE
    if not path.exists():
        fresh = path.with_name(f"{_FILE}.{secrets.token_hex(8)}")
        fresh.with_name(f"{fresh.name}.new").touch(0o600)  # what `write_json` writes and renames
        write_json(fresh, {"secret": secrets.token_hex(32)})
        with suppress(OSError):  # of two processes that draw one, the first one's counts
            os.link(fresh, path)
        if not path.exists():  # a file system without links
            fresh.replace(path)
        fresh.unlink(missing_ok=True)
    return read_record(_Record, path).secret
