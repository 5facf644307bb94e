"""The cache on disk: prepared data and models that later runs read.

A folder of the cache appears when it is complete, so that no reader sees half of it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import naming


def cache_dir() -> Path:
    """Return the cache's folder: ``$FEDTAILOR_CACHE``, or ``~/.cache/fedtailor``."""
    return Path(os.environ.get("FEDTAILOR_CACHE") or Path("~/.cache/fedtailor").expanduser())


def save(folder: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write ``arrays`` as ``folder/NAME.npy``; the folder appears when it is complete.

    Several processes may write the same folder at the same time; the first one's folder stays.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with naming(folder):
            for name, array in arrays.items():
                np.save(stage / f"{name}.npy", array)
        publish(stage, folder)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def publish(stage: Path, folder: Path) -> None:
    """Rename ``stage`` to ``folder``, unless another process was first."""
    try:
        stage.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
