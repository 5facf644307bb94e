"""Tensors of a run directory's safetensors files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ..errors import InputError
from .format import check_tensors, check_there, damaged


def tensors(path: Path, *names: str) -> dict[str, NDArray[Any]]:
    """Read the tensors of a safetensors file: those of ``names``, or all if there are none."""
    from safetensors import SafetensorError, safe_open

    check_there(path)
    check_tensors(path)
    try:
        with safe_open(path, framework="numpy") as file:
            if missing := set(names) - set(file.keys()):
                raise InputError(f"{path} lacks the tensors {', '.join(sorted(missing))}")
            return {name: file.get_tensor(name) for name in names or file.keys()}
    except SafetensorError as error:
        raise damaged(path, str(error)) from None
