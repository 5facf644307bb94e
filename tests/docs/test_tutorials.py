"""The tutorials run as they stand, and print what they show."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import pages

TUTORIALS = sorted((Path(__file__).parents[2] / "docs/tutorials").glob("*.md"))
SHORT = ("new-method",)
"""It runs in ``make test-slow``, the others in ``make test-long``."""


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(
            path,
            id=path.stem,
            marks=pytest.mark.slow if path.stem in SHORT else pytest.mark.long,
        )
        for path in TUTORIALS
    ],
)
def test_a_tutorial_runs_and_prints_what_it_shows(path: Path, tmp_path: Path) -> None:
    page = path.read_text()
    folder = tmp_path / "reader"
    folder.mkdir()
    printed = pages.run(page, folder)
    for block in pages.blocks(page):
        if block.language == "text":
            said = printed[block.line]
            assert not pages.missing(block, said), f"line {block.line}; printed:\n{said}"
