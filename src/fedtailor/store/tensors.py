"""Tensors of a run directory's safetensors files."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ..errors import InputError
from .format import check_tensors, check_there, damaged
from .logs import read_commit


@functools.lru_cache(maxsize=64)  # some are read tensor by tensor
def _check(path: Path, mtime: int, size: int) -> None:
    """Raise InputError if the file is damaged. The rows of the clients' private states change while
    a commit moves them."""
    try:
        check_tensors(path)
    except InputError:
        if path.name != "private.safetensors":
            raise
        staged = path.with_name(f"private-{read_commit(path.parent).round:06d}.safetensors")
        if not staged.exists():  # else they may be moved just now, or a kill has ended that
            raise


def tensors(path: Path, *names: str) -> dict[str, NDArray[Any]]:
    """Read the tensors of a safetensors file: those of ``names``, or all if there are none."""
    from safetensors import SafetensorError, safe_open

    check_there(path)
    about = path.stat()
    _check(path, about.st_mtime_ns, about.st_size)
    try:
        with safe_open(path, framework="numpy") as file:
            if missing := set(names) - set(file.keys()):
                raise InputError(f"{path} lacks the tensors {', '.join(sorted(missing))}")
            return {name: file.get_tensor(name) for name in names or file.keys()}
    except SafetensorError as error:
        raise damaged(path, str(error)) from None
