"""An export's own code, as its user runs it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any


def exported(folder: Path) -> Any:
    """The model of an export, made by the code in its folder."""
    for file in folder.glob("*.py"):
        sys.modules.pop(file.stem, None)
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module("model").Model(folder)
    finally:
        sys.path.remove(str(folder))
        for file in folder.glob("*.py"):
            sys.modules.pop(file.stem, None)
