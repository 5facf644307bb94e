"""The cache on disk: prepared data and models that later runs read.

A folder of the cache appears when it is complete, so that no reader sees half of it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import naming
from .temporary_folder import temporary_folder


def cache_dir() -> Path:
    """Return the cache's folder: ``$FEDTAILOR_CACHE``, or ``~/.cache/fedtailor``."""
    return Path(os.environ.get("FEDTAILOR_CACHE") or Path("~/.cache/fedtailor").expanduser())


def package_folder(name: str) -> Path | None:
    """Return where an installed package lies, which is not imported; None: it is not there."""
    spec = importlib.util.find_spec(name)
    return next((Path(folder) for folder in (spec and spec.submodule_search_locations) or ()), None)


def hash_of(head: bytes, parts: Iterable[bytes]) -> str:
    """Return a hash, 32 hexadecimal digits, over ``head`` and each of ``parts`` with its length."""
    digest = hashlib.sha256(head)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:32]


def save(folder: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write ``arrays`` as ``folder/NAME.npy``; the folder appears when it is complete.

    Several processes may write the same folder at the same time; the first one's folder stays.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with temporary_folder(f".{folder.name}-", folder.parent) as stage:
        with naming(folder):
            for name, array in arrays.items():
                np.save(stage / f"{name}.npy", array)
        publish(stage, folder)


def publish(stage: Path, folder: Path) -> None:
    """Rename ``stage`` to ``folder``, unless another process was first."""
    try:
        stage.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
