"""The version of the run directory's layout. Whoever opens a run directory checks it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import InputError, brief

FROM_PYTHON = "from Python: "  # begins the name of data or a model that only Python can give
FORMAT = 3
_LONGEST_NAME = 200  # bytes of a folder's name, with room for endings


def check_format(experiment: Mapping[str, Any], out: Path) -> None:
    """Check the version in the content of ``experiment.json`` of the run directory ``out``.

    Raises:
        InputError: an older or a newer version of fedtailor wrote the directory.
    """
    version = experiment.get("format", 1)  # the first layout did not say
    if version != FORMAT:
        older = isinstance(version, int) and version < FORMAT
        raise InputError(
            f"{out} has the run format {version!r} of {'an older' if older else 'a newer'} version "
            f"of fedtailor; this version reads and writes format {FORMAT}: open the directory with "
            "the version that wrote it (environment.json names it), or choose another --out"
        )


def check_folder_name(what: str, name: str) -> None:
    """Check that a run's name or a method's label can name a folder, and be printed.

    Raises:
        InputError: it can't.
    """
    fits = name.isprintable() and 0 < len(name.encode()) <= _LONGEST_NAME
    if not fits or "/" in name or name.startswith("."):
        raise InputError(
            f"{what} {brief(name)} can't name a folder; allowed: 1 to {_LONGEST_NAME} printable "
            "characters, no '/', no leading '.'"
        )
