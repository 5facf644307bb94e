"""The random number of a trial that its server keeps to itself, and under privacy of records each
site: noise and cohorts follow from it.

Who knows it can take the noise off. So only its owner may read the file, and no message has it. A
site has another one in its own folder, the key of what it tells of its data.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path

from .files import read_record, write_once
from .format import seal_json

_FILE = "secret.json"


@dataclass(frozen=True)
class _Record:
    secret: str


def secret_of(folder: Path) -> str:
    """The secret of the trial, or the site, in ``folder``, drawn when it is first asked for."""
    path = folder / _FILE
    if not path.exists():
        write_once(path, seal_json({"secret": secrets.token_hex(32)}))
    return read_record(_Record, path).secret
