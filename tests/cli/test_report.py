"""``fedtailor report``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fedtailor.cli import main

NOBODY = """
rounds = 2
data = {name = "digits", limit = 120}
split.clients = 3
model = {name = "cnn", pretrained = false, image_size = 16, width = 0.1}
faults = {drop_before = 1.0, machines = [{flops_per_second = 1e6}]}
methods = {fedavg = {}, fedper = {}}
"""


def test_the_page_is_drawn_and_its_name_printed(
    finished: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert main(["report", str(finished), "--out", str(page)]) == 0
    assert capfd.readouterr().out == f"{page}\n"
    assert "<svg" in page.read_text()


def test_the_page_of_one_run_lies_in_it_and_that_of_several_here(
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    run, page = tmp_path / "run", tmp_path / "report.html"
    shutil.copytree(finished, run)
    page.write_text("mine")
    assert main(["report", str(run)]) == 0
    assert page.read_text() == "mine"
    assert "<svg" in (run / "report.html").read_text()
    assert main(["report", str(run), str(finished)]) == 0
    assert "<svg" in page.read_text()
    assert capfd.readouterr().out == f"{run / 'report.html'}\nreport.html\n"


def test_a_file_that_is_no_run_is_refused(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(file)]) == 2
    error = capfd.readouterr().err
    assert "small.toml" in error
    assert error.count("\n") == 1
    before = file.read_text()
    assert main(["report", str(file.parent), "--out", str(file)]) == 2
    assert "a page's name ends with .html" in capfd.readouterr().err
    assert file.read_text() == before


@pytest.mark.slow
@pytest.mark.parametrize("buffer", ["none", "2"])
def test_a_run_in_which_everybody_drops_out_can_be_read(
    buffer: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file, run = tmp_path / "nobody.toml", str(tmp_path / "run")
    file.write_text(NOBODY)
    assert main(["run", str(file), "--out", run, "--set", f"cohort.buffer={buffer}"]) == 0
    assert capfd.readouterr().err.count("no upload is there") == 4
    for command in ("compare", "report", "check"):
        assert main([command, run]) == 0
    printed = capfd.readouterr()
    assert "fedper" in printed.out
    assert "0 damaged" in printed.out
    assert "nan" not in printed.out
    assert printed.err == ""
