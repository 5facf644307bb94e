"""The table of every client, with a row for each, or a word about those without one."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fedtailor.report.charts import content as charts
from fedtailor.report.charts import every_client as rows
from fedtailor.report.charts.every_client import every_client
from fedtailor.report.page import write
from tests.report.charts.test_content import content_of

MakeRun = Callable[..., Path]


def test_rows_are_named_for_the_script(make_run: MakeRun) -> None:
    found = every_client(content_of(make_run(methods=("fedavg", "local"))))
    assert found.keys[:2] == ["0:0", "0:1"]
    assert found.header == ["client", "clients of", "train", "test", "fedavg", "local"]
    assert found.cells[0][:4] == ["0", "seed 0", "60", "20"]
    assert len(found.cells) == 10
    assert found.note == ""


def test_the_page_says_which_rows_are_left_out(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "_MAX_ROWS", 4)
    monkeypatch.setattr(charts, "MAX_CLIENTS", 4)
    run = make_run()
    text = write([run], tmp_path / "page.html").read_text()
    assert "The table shows the first 4 of 6 rows. Of up to 6 clients the page has 4" in text
    assert "methods/METHOD/seed-SEED/clients.jsonl has all" in text
    assert (run / "methods/fedavg/seed-0/clients.jsonl").exists()
