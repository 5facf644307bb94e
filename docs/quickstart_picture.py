"""Photograph the beginning of the quickstart's report for the home page.

    fedtailor run quickstart
    python docs/quickstart_picture.py runs/quickstart

Writes ``docs/images/quickstart.png``. Needs Chromium.
"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image
from playwright.sync_api import sync_playwright

from fedtailor.report.page import write

_OUT = Path(__file__).parent / "images/quickstart.png"
_WIDTH, _MARGIN = 870, 10  # pixels
_ENDS = """() => [
  document.querySelector("#verdict").getBoundingClientRect().top,
  document.querySelector("#results table").getBoundingClientRect().bottom,
]"""


def photograph(run: Path, out: Path) -> None:
    """Write the verdict and the table of results of ``run`` as the picture ``out``."""
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = write(run, Path(folder) / "report.html")
        chromium = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        page = chromium.new_page(
            viewport={"width": _WIDTH, "height": 2000}, device_scale_factor=1.5
        )
        page.goto(page_file.resolve().as_uri())
        page.wait_for_selector("html.drawn", state="attached")
        top, bottom = page.evaluate(_ENDS)
        clip = {"x": 0, "y": top - _MARGIN, "width": _WIDTH, "height": bottom - top + _MARGIN}
        picture = Image.open(io.BytesIO(page.screenshot(clip=clip)))
        chromium.close()
    picture.convert("RGB").quantize(256).save(out, optimize=True)


if __name__ == "__main__":
    photograph(Path(sys.argv[1]), _OUT)
