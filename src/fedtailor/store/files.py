"""Files of a run directory: written whole or not at all, and read with their checksums."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from ..errors import naming
from ..params import Params, encode
from .checked import read_json as read_json
from .checked import read_record as read_record
from .checked import record as record
from .format import check_tensors, damaged, seal_json, seal_tensors


def write_atomically(path: Path, *content: bytes | memoryview) -> None:
    """Write a file whole or not at all, and durably; its content may come in several parts."""
    fresh = path.with_name(path.name + ".new")
    with naming(fresh):
        with fresh.open("wb") as file:
            file.writelines(content)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
        sync_folder(path.parent)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file with a checksum, as `write_atomically` does."""
    write_atomically(path, seal_json(content))


def write_once(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read, as `write_atomically` does. Of two processes that
    write it, the first one's counts."""
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    fresh.with_name(f"{fresh.name}.new").touch(0o600)
    write_atomically(fresh, content)
    with suppress(OSError):
        os.link(fresh, path)
    if not path.exists():  # a file system without links
        fresh.replace(path)
    fresh.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    """Make a folder and those that it lies in, where they are missing, durably."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync_folder(path.parent)


def save_tensors(path: Path, tensors: Params) -> None:
    """Write tensors by name as a safetensors file with a checksum, as `write_atomically` does."""
    write_atomically(path, *seal_tensors(encode(tensors)))


def load_tensors(path: Path) -> Params:
    """What `save_tensors` has written."""
    check_tensors(path)
    try:
        tensors: Params = load_file(path)
    except SafetensorError as error:
        raise damaged(path, str(error)) from None
    return tensors


def sync_folder(folder: Path) -> None:
    """Bring the names of new files in ``folder`` to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
