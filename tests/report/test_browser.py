"""The page in a browser: Debian's Chromium without a window, driven by Playwright."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from fedtailor.report.page import write
from tests.report.conftest import K, write_run

pytestmark = pytest.mark.slow
METHODS = ("local", "fedavg", "fedmerge", "fedsdg", "apfl", "pfedgate")


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = write_run(tmp_path_factory.mktemp("runs") / "first", methods=METHODS)
    rng = np.random.default_rng(0)
    for seed in (0, 1):
        for when in (2, 4, 8):
            logits = rng.normal(size=(K, 3)) * when / 100
            weights = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
            tensors = {"server/weights": weights.astype(np.float32), "server_clients": np.arange(K)}
            folder = run / f"methods/fedmerge/seed-{seed}"
            save_file(tensors, folder / f"diagnostics-{when:06d}.safetensors")
            tensors = {
                "client/mix": rng.uniform(size=K).astype(np.float32),
                "clients": np.arange(K),
            }
            save_file(tensors, run / f"methods/apfl/seed-{seed}/diagnostics-{when:06d}.safetensors")
            counts = np.full((K, 3, 3), seed + 1, np.int32)
            for label in METHODS:
                matrices = {"personal/test": counts, "personal/clients": np.arange(K)}
                place = run / f"methods/{label}/seed-{seed}/confusion-{when:06d}.safetensors"
                save_file(matrices, place)
            tensors = {"client/gates": rng.uniform(size=(K, 5)), "clients": np.arange(K)}
            place = run / f"methods/pfedgate/seed-{seed}/diagnostics-{when:06d}.safetensors"
            save_file(tensors, place)
    return write([run], run.parent / "page.html")


@pytest.fixture
def opened(new_page: Callable[..., Any], page_file: Path) -> Iterator[Any]:
    """Open the page, and hold it to a quiet console."""
    pages: list[Any] = []
    said: list[str] = []
    asked: list[str] = []

    def open_page(width: int = 1400, theme: str = "light", **options: Any) -> Any:
        viewport = {"width": width, "height": 900}
        page = new_page(viewport=viewport, color_scheme=theme, **options)
        pages.append(page)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(page_file.as_uri())
        if options.get("java_script_enabled", True):
            page.wait_for_selector("html.drawn", state="attached")
        return page

    yield open_page
    for page in pages:
        page.close()
    assert said == []
    assert all(url.startswith(("file:", "data:", "blob:")) for url in asked)


def _wait(page: Any, until: Callable[[], bool]) -> None:
    """Wait for what a page draws, on a busy machine for long."""
    for _ in range(300):
        if until():
            return
        page.wait_for_timeout(100)
    raise AssertionError("the page was not drawn anew")


def _charts(page: Any) -> dict[str, Any]:
    """The size of each chart that is shown, by name."""
    found: dict[str, Any] = page.evaluate(
        """Object.fromEntries([...document.querySelectorAll(".chart canvas")].map((c) =>
             [c.closest(".chart").dataset.chart, c.getBoundingClientRect().width]))"""
    )
    return found


def _colours(page: Any, chart: str) -> set[str]:
    """The colours that a chart has, roughly."""
    found: list[str] = page.evaluate(
        """(name) => {
          const canvas = document.querySelector(`.chart[data-chart="${name}"] canvas`);
          const { width, height } = canvas, seen = new Set();
          const copy = Object.assign(document.createElement("canvas"), { width, height });
          const context = copy.getContext("2d", { willReadFrequently: true });
          context.drawImage(canvas, 0, 0);
          const { data } = context.getImageData(0, 0, width, height);
          for (let i = 0; i < data.length; i += 4)
            if (data[i + 3] > 250) seen.add([0, 1, 2].map((k) => data[i + k] >> 3).join());
          return [...seen];
        }""",
        chart,
    )
    return set(found)


@pytest.mark.parametrize(("width", "theme"), [(390, "dark"), (820, "light"), (1400, "light")])
def test_all_charts_are_drawn_and_nothing_is_wider_than_the_window(
    opened: Any, width: int, theme: str
) -> None:
    page = opened(width, theme)
    charts = _charts(page)
    assert charts.keys() == {
        "ahead", "clients", "curves-validation", "curves-test", "pareto-bytes", "pareto-flops",
        "pareto-cpu", "pareto-seconds", "picture-2", "picture-3", "picture-4", "picture-5",
        "confusion", "labels",
    }  # fmt: skip
    assert all(100 < size < width for size in charts.values())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator(".static-only").first.is_hidden()


def test_charts_follow_the_theme_while_the_page_is_open(opened: Any) -> None:
    page = opened(theme="light")
    light = _colours(page, "curves-test")
    page.emulate_media(color_scheme="dark")
    _wait(page, lambda: len(_colours(page, "curves-test") & light) < len(light) / 2)


def test_methods_can_be_left_out_of_charts_and_tables(opened: Any) -> None:
    page = opened()
    before = _colours(page, "curves-test")
    page.get_by_role("button", name="None", exact=True).click()
    page.get_by_role("checkbox", name="fedsdg").check()
    _wait(page, lambda: len(_colours(page, "curves-test")) < len(before))
    rows = page.locator("#results table").first.locator("tbody tr:visible th")
    assert rows.all_inner_texts() == ["fedsdg"]
    page.get_by_role("button", name="All", exact=True).click()
    assert rows.count() == len(METHODS)


def test_the_front_is_that_of_the_shown_methods(opened: Any) -> None:
    page = opened()
    on_line = """() => {
      const found = new Set();
      const look = (item) => {
        if (item.marktype === "line") item.items.forEach((one) => found.add(one.datum.method));
        (item.items ?? []).forEach((one) => one.items && look(one));
      };
      look(document.querySelector('.chart[data-chart="pareto-bytes"]').view.scenegraph().root);
      return [...found];
    }"""
    assert page.evaluate(on_line) == ["local", "fedsdg"]
    page.get_by_role("checkbox", name="fedsdg").uncheck()
    _wait(page, lambda: page.evaluate(on_line) == ["local", "fedavg"])


def _place(page: Any, name: str, mark: str) -> tuple[float, float]:
    """Scroll to a chart, and return where its first mark of a client is."""
    x, y = page.evaluate(
        """([name, mark]) => {
          const chart = document.querySelector(`.chart[data-chart="${name}"]`);
          chart.scrollIntoView({ block: "center" });
          const dots = [];
          const look = (item) => {
            if (item.marktype === mark) dots.push(...item.items.filter((one) => one.datum?.key));
            (item.items ?? []).forEach((one) => one.items && look(one));
          };
          look(chart.view.scenegraph().root);
          const { x, y } = chart.querySelector("canvas").getBoundingClientRect();
          const [left, top] = chart.view.origin(), pad = chart.view.padding();
          const { x1, x2, y1, y2 } = dots[0].bounds;
          return [x + pad.left + left + (x1 + x2) / 2, y + pad.top + top + (y1 + y2) / 2];
        }""",
        [name, mark],
    )
    return x, y


@pytest.mark.parametrize(
    ("chart", "mark", "words"),
    [
        ("picture-4", "symbol", ("client", "weight of the client's own model")),
        ("picture-5", "rect", ("client", "block of parameters", "gate")),
    ],
)
def test_the_pointer_shows_numbers_of_methods_charts(
    opened: Any, chart: str, mark: str, words: tuple[str, ...]
) -> None:
    page = opened()
    page.mouse.move(*_place(page, chart, mark))
    shown = page.locator("#vg-tooltip-element")
    shown.wait_for()
    assert all(word in shown.inner_text() for word in words)


def test_a_click_on_a_client_shows_it(opened: Any) -> None:
    page = opened()
    x, y = _place(page, "clients", "symbol")
    panel = page.locator("#client-panel")
    assert panel.is_hidden()
    page.mouse.move(x, y)
    words = page.locator("#vg-tooltip-element")
    words.wait_for()
    for name in ("client", "method", "test accuracy (%)", "training examples"):
        assert name in words.inner_text()
    page.mouse.click(x, y)
    assert panel.is_visible()
    assert page.locator("#client-title").inner_text().startswith("Client ")
    assert "seed" in page.locator("#client-title").inner_text()
    assert page.locator("#client-results tr").count() == len(METHODS)
    page.wait_for_selector('.chart[data-chart="client-curves"] canvas')
    page.wait_for_selector('.chart[data-chart="client-labels"] canvas')
    assert "weight by model" in page.locator("#client-learned").inner_text()


def test_the_keyboard_chooses_a_client_and_a_round_and_sorts(opened: Any) -> None:
    page = opened()
    page.locator("#client-name").focus()
    page.keyboard.press("ArrowDown")
    assert page.locator("#client-title").inner_text() == "Client 0, seed 0"
    before = _colours(page, "picture-2")
    slider = page.locator('input[type="range"]').first
    slider.focus()
    page.keyboard.press("Home")
    assert page.locator("output").first.inner_text() == "2"
    _wait(page, lambda: _colours(page, "picture-2") != before)
    names = page.locator("#results table").first.locator("tbody th")
    head = page.locator("#results table").first.get_by_role("button", name="worst")
    head.focus()
    page.keyboard.press("Enter")
    first = names.all_inner_texts()
    page.keyboard.press("Enter")
    assert first != names.all_inner_texts()
    assert sorted(first) == sorted(names.all_inner_texts())


def test_columns_of_names_begin_upwards_and_those_of_numbers_downwards(opened: Any) -> None:
    page = opened()
    table = page.locator("#results table").first
    table.get_by_role("button", name="method", exact=True).click()
    assert table.locator("tbody th").all_inner_texts() == sorted(METHODS)
    table.get_by_role("button", name="accuracy", exact=True).click()
    cells = table.locator("tbody td:nth-child(2)").all_inner_texts()
    values = [float(cell.partition("±")[0]) for cell in cells]
    assert values == sorted(values, reverse=True)
    assert table.locator("[aria-sort]").get_attribute("aria-sort") == "descending"


def test_tab_reaches_every_control(opened: Any) -> None:
    page = opened()
    wanted = page.evaluate(
        """() => {
          const all = document.querySelectorAll(
            "a[href], button, input, select, summary, [tabindex='0']");
          const shown = [...all].filter((e) => e.checkVisibility());
          shown.forEach((e, k) => (e.dataset.place = k));
          return shown.length;
        }"""
    )
    seen = set()
    for _ in range(wanted + 5):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.dataset.place"))
    assert seen >= {str(k) for k in range(wanted)}


def test_clients_are_found_by_name(opened: Any) -> None:
    page = opened()
    page.get_by_text("Table of every client").click()
    rows = page.locator("tr[data-key]:visible")
    assert rows.count() == 10  # five with test examples, two seeds
    page.locator("#client-search").fill("5")
    assert rows.count() == 2
    rows.first.get_by_role("button").click()
    assert page.locator("#client-title").inner_text() == "Client 5, seed 0"


def test_charts_and_tables_can_be_saved(opened: Any, tmp_path: Path) -> None:
    page = opened(theme="dark")
    for name, start in (("CSV", "method,accuracy,weighted"), ("LaTeX", r"\begin{tabular}")):
        with page.expect_download() as download:
            page.locator("#results").get_by_role("link", name=name).first.click()
        download.value.save_as(tmp_path / name)
        assert (tmp_path / name).read_text().startswith(start)
    page.locator('.chart[data-chart="curves-test"] summary').click()
    with page.expect_download() as download:
        page.locator('.chart[data-chart="curves-test"] a', has_text="SVG").click()
    download.value.save_as(tmp_path / "chart.svg")
    saved = (tmp_path / "chart.svg").read_text()
    assert saved.startswith("<svg")
    assert re.match(r'<svg[^>]*><rect [^>]*fill="#1b2127"', saved)
    assert all(f">{label}<" in saved for label in METHODS)


def test_without_scripts_there_are_tables_and_the_way_to_the_charts(opened: Any) -> None:
    page = opened(java_script_enabled=False)
    assert page.locator(".live-only").first.is_hidden()
    assert (
        "fedtailor report RUN --figures FOLDER"
        in page.locator("#verdict .static-only").inner_text()
    )
    assert page.locator("section.live-only").first.is_hidden()
    assert page.locator("#results table").first.locator("tbody tr").count() == len(METHODS)
    assert "is best on validation data" in page.locator("#verdict").inner_text()
    command = page.locator("#verdict code").first.inner_text()
    assert command.startswith("fedtailor predict ")
