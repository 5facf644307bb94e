"""Which tests share a worker, and with it what their file sets up once: those of one file, or of
one method in the conformance suite. And what a test draws without a seed of its own: the same each
time. And the browser that opens pages. They use the CPU, also where there is a GPU, unless
CUDA_VISIBLE_DEVICES names one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
settings.register_profile("ours", deadline=None, max_examples=40)  # the machine may be busy
settings.load_profile("ours")


class ByFile(LoadScopeScheduling):  # type: ignore[misc]
    """Sends the tests of a group to one worker."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return nodeid.rpartition("[")[2] if path.endswith("test_conformance.py") else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """``-m slow`` and ``-m long`` import no file that does not name the mark."""
    mark = config.option.markexpr
    if mark not in ("slow", "long") or collection_path.suffix != ".py":
        return None
    return f"mark.{mark}" not in collection_path.read_text() or None


def pytest_runtest_setup() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def new_page() -> Iterator[Callable[..., Any]]:
    """Opens a page in Debian's Chromium, without a window; a busy machine may take minutes."""
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    assert chromium is not None, "no chromium; sh requirements/chromium.sh installs it"
    with sync_playwright() as one:
        browser = one.chromium.launch(executable_path=chromium, args=["--no-sandbox"])

        def opened(**options: Any) -> Any:
            page = browser.new_page(**options)
            page.set_default_timeout(180_000)
            return page

        yield opened
        browser.close()
