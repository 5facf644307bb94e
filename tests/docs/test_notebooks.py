"""The notebooks run from the top in a fresh kernel, and show what they are stored with."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from tests.docs import notebooks

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs/notebooks").glob("*.ipynb"))
SHORT = ("1-first-comparison",)
"""It runs in ``make test-slow``, the others in ``make test-long``."""


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path,
            id=path.stem,
            marks=pytest.mark.slow if path.stem in SHORT else pytest.mark.long,
        )
        for path in NOTEBOOKS
    ],
)
def test_a_notebook_runs_and_shows_what_it_is_stored_with(path: Path, tmp_path: Path) -> None:
    stored = nbformat.read(path, as_version=4)
    shows = notebooks.kinds(stored)
    assert any(shows)
    assert notebooks.kinds(notebooks.execute(path, tmp_path)) == shows


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small(path: Path) -> None:
    assert path.stat().st_size < 200_000
