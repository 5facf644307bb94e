"""The version of the run directory's layout. Whoever opens a run directory checks it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .errors import InputError

FROM_PYTHON = "from Python: "  # begins the name of data or a model that only Python can give
FORMAT = 3


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
