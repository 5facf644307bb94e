"""The built-in experiments and grids: files of the package that a name stands for."""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from ..errors import InputError, missing_file, unknown

_FOLDER = Path(__file__).parent.parent / "experiments"


def experiments() -> dict[str, Path]:
    """Return the built-in experiments' files by name; those of the papers come last.

    >>> {"quickstart", "papers/fedsq/rounds"} <= set(experiments())
    True
    """
    papers = _FOLDER / "papers"
    return _files(_FOLDER) | {
        f"papers/{folder.name}/{name}": path
        for folder in sorted(path for path in papers.iterdir() if path.is_dir())
        for name, path in _files(folder).items()
    }


def grids() -> dict[str, Path]:
    """Return the files of the built-in grids for ``fedtailor tune`` by name.

    >>> "baselines" in grids()
    True
    """
    return _files(_FOLDER / "grids")


def find(path: Path, builtin: Mapping[str, Path], what: str = "experiment") -> Path:
    """Return the file that ``path`` names: a file that exists, or else the built-in one of that
    name."""
    if path.is_file():
        return path
    if str(path) in builtin:
        return builtin[str(path)]
    if (path / "experiment.json").is_file():
        raise InputError(f"{path} is a run directory; give the experiment file that was run")
    if path.name == str(path) and not path.suffix and not path.is_dir():
        raise unknown(what, str(path), builtin, kind="no file has that name; built-in")
    hint = f"; the built-in one runs by name: {path.stem}" if path.stem in builtin else ""
    if path.is_dir() or (what == "experiment" and not path.suffix):
        raise InputError(f"{path} is no {what} file, and no run directory{hint}")
    raise missing_file(path, hint, what=f"{what} file")


def purpose(file: Path) -> str:
    """Return what an experiment is for: how the comment at its file's top begins.

    >>> purpose(experiments()["quickstart"])
    'Twenty clients with newsgroup posts'
    """
    lines = itertools.takewhile(lambda line: line.startswith("#"), file.read_text().splitlines())
    comment = " ".join(line.removeprefix("#").strip() for line in lines)
    return re.split("[.:;] ", comment)[0].removesuffix(".")


def presets(file: Path) -> list[str]:
    """Return the names of an experiment's presets.

    >>> presets(experiments()["quickstart"])
    ['small']
    """
    return list(tomllib.loads(file.read_text()).get("presets", {}))


def _files(folder: Path) -> dict[str, Path]:
    files = sorted(folder.glob("*.toml"), key=lambda path: path.stem)
    return {path.stem: path for path in files}
