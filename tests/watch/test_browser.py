"""The page in Debian's Chromium, beside a real run in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.watch.test_server import serving

pytestmark = pytest.mark.slow
MakeRun = Callable[..., Path]
# rounds of a second or more, in which one can see whether the page keeps up
FILE = """
rounds = 8
data = {name = "digits", limit = 900}
split = {clients = 6}
model = {name = "lenet", width = 0.5, image_size = 24, pretrained = false}
local = {batch_size = 8, epochs = 4}
[methods.fedavg]
[methods.local]
"""
# what the page shows, and since when, in milliseconds
OBSERVE = """() => {
  window.seen = [];
  new MutationObserver(() => {
    const text = [...document.querySelectorAll("tbody tr")]
      .map((row) => Number(row.cells[2].textContent.split(" ")[0]));
    window.seen.push([Date.now(), text.reduce((a, b) => a + b, 0)]);
  }).observe(document.querySelector("tbody"), { childList: true, subtree: true });
}"""


@pytest.fixture
def opened(new_page: Callable[..., Any]) -> Iterator[Any]:
    """Open a page, and hold it to a quiet console and to its own server."""
    pages: list[Any] = []
    said: list[str] = []
    asked: list[str] = []

    def open_page(url: str, width: int = 1400, theme: str = "light") -> Any:
        page = new_page(viewport={"width": width, "height": 900}, color_scheme=theme)
        pages.append(page)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(url)
        page.wait_for_selector("html[data-version]", state="attached")
        return page

    yield open_page
    for page in pages:
        page.close()
    aborted = "Failed to load resource: net::ERR_FAILED"  # by a test
    assert [text for text in said if text != aborted] == []
    assert all(url.startswith(("http://127.0.0.1:", "data:", "blob:")) for url in asked)


def rounds(out: Path) -> int:
    """The committed rounds of a run."""
    commits = out.glob("methods/*/*/commit.json")
    return sum(json.loads(path.read_text())["round"] for path in commits)


def test_a_round_is_shown_within_two_seconds_after_its_commit(tmp_path: Path, opened: Any) -> None:
    file, out = tmp_path / "e.toml", tmp_path / "run"
    file.write_text(FILE)
    command = [sys.executable, "-m", "fedtailor", "run", str(file), "--out", str(out)]
    committed: dict[int, float] = {}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        while not (out / "experiment.json").exists():
            assert run.poll() is None
            time.sleep(0.01)
        with serving(out) as server:
            page = opened(server.url)
            page.evaluate(OBSERVE)
            while run.poll() is None:
                committed.setdefault(rounds(out), 1000 * time.time())
                page.wait_for_timeout(50)  # its events are handled meanwhile
            assert run.returncode == 0
            page.wait_for_selector("#report:visible")
            seen = page.evaluate("window.seen")
            assert page.locator("#note").inner_text() == "e has ended"
            assert page.locator("#share").inner_text() == "16 of 16 rounds"
            page.get_by_role("link", name="report").click()
            page.wait_for_selector("html.drawn", state="attached")
            assert page.locator("#verdict").is_visible()
    first = min(number for _, number in seen)
    delays = {
        number: min(at for at, shown in seen if shown >= number) - when
        for number, when in committed.items()
        if number > first
    }
    assert len(delays) >= 8
    assert max(delays.values()) < 2000, delays


@pytest.mark.parametrize(("width", "theme"), [(390, "dark"), (1400, "light")])
def test_charts_and_table_are_drawn_and_nothing_is_wider_than_the_window(
    make_run: MakeRun, opened: Any, width: int, theme: str
) -> None:
    out = make_run(done=5, seeds=(0, 1), methods=("local", "fedavg", "fedmerge", "fedsdg"))
    (out / "run.log").write_text("a line " * 60 + "\n")
    with serving(out) as server:
        page = opened(server.url, width, theme)
        page.wait_for_selector('.chart[data-chart="losses"] canvas')
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        sizes = page.eval_on_selector_all(".chart canvas", "all => all.map(c => c.clientWidth)")
        assert len(sizes) == 2
        assert all(100 < size < width for size in sizes)
        assert page.locator("tbody tr").count() == 8
        row = page.locator("tbody tr").nth(3).locator("td").all_inner_texts()
        assert row[:6] == ["0", "5 of 8", "78.3", "78.3", "4", "interrupted"]
        box = page.get_by_role("checkbox", name="fedsdg")
        for act, focus in ((box.focus, "fedsdg"), (box.blur, None)):
            act()
            found = page.evaluate("document.querySelector('.chart').view.signal('focus')")
            assert found == focus
        box.uncheck()
        page.emulate_media(color_scheme="dark" if theme == "light" else "light")
        page.wait_for_timeout(300)


def test_a_server_that_has_ended_and_comes_back_is_told(
    make_run: MakeRun, opened: Any, tmp_path: Path
) -> None:
    out = make_run(done=3)
    with serving(out) as server:
        page = opened(server.url)
        assert page.locator("#trouble").is_hidden()
        page.route("**/state*", lambda route: route.abort())
        page.wait_for_selector("#trouble:visible")
        assert "fedtailor watch does not answer" in page.locator("#trouble").inner_text()
        page.unroute("**/state*")
        page.wait_for_selector("#trouble", state="hidden")
        (out / "experiment.json").rename(tmp_path / "gone")
        page.wait_for_selector("#note:has-text('no process runs it')")
