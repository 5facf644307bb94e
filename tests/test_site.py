"""The documentation's pages: built without a warning, and readable in a browser."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-E", "-W", "--keep-going"]
    done = subprocess.run(
        [*command, ROOT / "docs", out], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return out


def test_every_page_fits_a_phone_and_loads_nothing_from_the_network(
    site: Path, new_page: Callable[..., Any]
) -> None:
    page = new_page(viewport={"width": 390, "height": 844})
    problems: list[str] = []
    urls: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: urls.append(request.url))
    pages = [path for path in site.rglob("*.html") if "_modules" not in path.parts]
    assert len(pages) > 80
    for path in pages:
        page.goto(path.as_uri())
        if page.evaluate("document.querySelector('.content').scrollWidth") > 390:
            problems.append(f"{path.relative_to(site)} is wider than a phone")
        for wrong in page.locator(".katex-error").all():
            problems.append(f"{path.relative_to(site)}: {wrong.get_attribute('title')}")
        for formula in page.locator(".formula:not(:has(.katex))").all():
            problems.append(f"{path.relative_to(site)}: {formula.inner_text()} is not drawn")
    assert problems == []
    assert all(url.startswith(("file:", "data:")) for url in urls)


def test_the_search_finds_a_page(site: Path, new_page: Callable[..., Any]) -> None:
    page = new_page()
    page.goto((site / "search.html").as_uri() + "?q=dirichlet")
    page.wait_for_selector("#search-results li a:text('Glossary')")  # one comes after the other
