"""Names reach every output as they are: none is read as a command of its markup."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import unescape
from pathlib import Path

import pytest

from fedtailor.report import page
from fedtailor.report.drawing import short
from tests.names import LABELS, NAMES
from tests.report.conftest import hold, name
from tests.report.written import written

CLASSES = NAMES[:24]  # a figure writes the names of so many
DRAWN = ("_$5_$", "$\\frac{$", "$10-$20", "a&b_c%#{}~^\\", "<img src=x onerror=a()>", "n" * 200)


def write_run(folder: Path, labels: Sequence[str]) -> Path:
    """A run whose methods, clients and classes have such names."""
    values = [0.01 * k for k in range(len(NAMES))]
    written(folder, dict.fromkeys(("local", *labels), values), names=NAMES)
    name(folder, 0, classes=CLASSES)
    hold(folder, 0, labels=[[k + c for c in range(len(CLASSES))] for k in range(len(NAMES))])
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "a_$5_$ [bold]", LABELS)


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("drawn")
    return page.write(write_run(folder / "run", DRAWN), folder / "page.html").read_text("utf-8")


def drawn(html: str) -> Iterator[str]:
    """The words in the figures."""
    for figure in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        yield from (unescape(words) for words in re.findall(r">([^<>\n]+)</text>", figure))


def test_figures_write_names_as_they_are(html: str) -> None:
    words = list(drawn(html))
    assert {short(one, 24) for one in NAMES} <= set(words)
    # beside its axis and in three legends; matplotlib's own rule leaves out a leading _
    assert [words.count(short(label)) >= 4 for label in DRAWN] == [True] * len(DRAWN)
