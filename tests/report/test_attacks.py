"""Maps of results by attack."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedtailor.errors import InputError
from fedtailor.report import select
from fedtailor.report.attacks import attack_maps
from fedtailor.report.page import write
from fedtailor.report.table import table
from fedtailor.report.text import TextTable
from fedtailor.store.read import read, read_all

MakeRun = Callable[..., Path]
FLIP = {"kind": "sign-flip", "fraction": 0.2, "clients": [], "strength": 5.0}


def maps(paths: list[Path]) -> list[TextTable]:
    runs = read_all(paths)  # type: ignore[arg-type]
    return attack_maps(select.entries(runs), table(runs))


def test_methods_by_attacks(make_run: MakeRun) -> None:
    clean = make_run("clean", name="clean")
    paths = [
        make_run("flip", name="flip", attack=FLIP, methods=("fedsdg", "local")),
        clean,
        make_run("more", name="more", attack={"kind": "mimic", "clients": [1, 4]}, seeds=(0,)),
    ]
    personal, shared = maps(paths)
    assert personal.title == "Personal models: test accuracy (%)"
    assert shared.title == "Global models: test accuracy (%)"
    assert personal.flat_header == [
        "method", "no attack", "sign-flip, 20\u00a0%, strength 5", "mimic, clients 1 and 4",
    ]  # fmt: skip
    assert [row[0] for row in personal.cells] == ["fedsdg", "local", "fedavg"]
    rows = {row.label: row.personal_model for row in table([read(clean)]).rows}
    for y, method in ((0, "fedsdg"), (2, "fedavg")):
        result = rows[method]
        assert result is not None
        assert personal.cells[y][1] == f"{100 * result.mean.mean:.1f}"
    assert [row[2] == "-" for row in personal.cells] == [False, False, True]
    assert (2, 2) not in personal.levels
    assert min(personal.levels.values()) == 0
    assert max(personal.levels.values()) == 45


@pytest.mark.parametrize("other", [{"epochs": 2}, {"rounds": 6, "attack": FLIP}])
def test_other_settings_have_a_row_of_their_own(make_run: MakeRun, other: dict[str, Any]) -> None:
    paths = [make_run("a", name="a", attack=FLIP), make_run("b", name="b", **other)]
    personal, _ = maps(paths)
    assert [row[0] for row in personal.cells] == [
        "fedavg (a)", "fedsdg (a)", "fedavg (b)", "fedsdg (b)",
    ]  # fmt: skip


@pytest.mark.slow
def test_the_page_has_them_only_with_an_attack(make_run: MakeRun, tmp_path: Path) -> None:
    attacked, clean = make_run("flip", attack=FLIP), make_run("clean")
    text = write([attacked], tmp_path / "page.html").read_text()
    assert '<section id="attacks"' in text
    assert 'class="level" style="--level: 45%"' in text
    assert '<section id="attacks"' not in write([clean], tmp_path / "page.html").read_text()


def test_a_damaged_attack_is_told(make_run: MakeRun) -> None:
    path = make_run()
    content = json.loads((path / "experiment.json").read_text())
    content["attack"] = {"kind": 3}
    (path / "experiment.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match="attack: kind = 3"):
        read(path)
