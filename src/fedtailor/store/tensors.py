"""Tensors of a run directory's safetensors files."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ..errors import InputError
from .format import check_tensors, check_there, damaged
from .logs import read_commit


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    check_there(path)
    about = path.stat()
    _check(path, about.st_mtime_ns, about.st_size)
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except SafetensorError as error:
        raise damaged(path, str(error)) from None


@functools.lru_cache(maxsize=64)  # some are read tensor by tensor
def _check(path: Path, mtime: int, size: int) -> None:
    """Raise InputError if the file is damaged. The rows of the clients' private states change while
    a commit moves them."""
    try:
        check_tensors(path)
    except InputError:
        if path.name != "private.safetensors" or not _is_moved(path.parent):
            raise


def _is_moved(folder: Path) -> bool:
    """Whether private states of the last round are moved just now, or a kill has ended that."""
    return (folder / f"private-{read_commit(folder).round:06d}.safetensors").exists()


def tensors(path: Path, *names: str) -> dict[str, NDArray[Any]]:
    """Read the tensors of a safetensors file: those of ``names``, or all if there are none. Raises
    InputError where the file is missing, damaged, or lacks one of ``names``."""
    with _opened(path) as file:
        if missing := set(names) - set(file.keys()):
            raise InputError(f"{path} lacks the tensors {', '.join(sorted(missing))}")
        return {name: file.get_tensor(name) for name in names or file.keys()}


def tensor_names(path: Path) -> list[str]:
    """Return the sorted names of a safetensors file's tensors, without reading the tensors. Raises
    InputError where the file is missing or damaged."""
    with _opened(path) as file:
        return sorted(file.keys())
