"""The page's charts as files: which there are, and what stands in them."""

import re
import sys
from collections.abc import Callable
from html import unescape
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from fedtailor.cli import main
from fedtailor.report import figures
from fedtailor.report.charts.content import groups
from fedtailor.report.charts.specs import curves
from fedtailor.report.drawing import COLOURS, DARK, LOOK, svg
from fedtailor.report.page import compared
from fedtailor.report.select import entries
from fedtailor.store.read import read
from tests.report.conftest import correct

MakeRun = Callable[..., Path]


def words_of(text: str) -> list[str]:
    """The words in an SVG file."""
    return [unescape(words) for words in re.findall(r">([^<>\n]+)</text>", text)]


def rows_of(run: Path, chart: str, at: int = 0) -> list[dict]:
    (rows,) = figures._rows_of(chart, at, compared([run])[3]).values()
    return rows


def diagnose(run: Path, method: str, when: int, name: str, values: np.ndarray) -> None:
    tensors = {f"client/{name}": values.astype(np.float32), "clients": np.arange(len(values))}
    for trial in (run / "methods" / method).iterdir():
        save_file(tensors, trial / f"diagnostics-{when:06d}.safetensors")


@pytest.mark.slow
def test_each_chart_is_a_file_of_each_kind_with_the_names_in_it(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(methods=("local", "apfl"), seeds=(0,))
    diagnose(run, "apfl", 4, "mix", np.array([0.2, 0.9, 0.4]))
    assert main(["report", str(run), "--figures", str(run / "figures")]) == 0
    page, *paths = map(Path, capsys.readouterr().out.splitlines())
    assert page == run / "report.html"
    assert sorted(paths) == sorted((run / "figures").iterdir())
    charts = {"ahead", "clients", "apfl-clients-by-round", "labels"}
    charts |= {f"convergence-{split}" for split in ("validation", "test")}
    charts |= {f"cost-{name}" for name in ("bytes", "flops", "cpu", "seconds")}
    kinds = {".svg": b"<svg", ".png": b"\x89PNG", ".pdf": b"%PDF"}
    assert {path.stem for path in paths} == charts
    for path in paths:
        assert path.read_bytes().startswith(kinds[path.suffix])
    words = words_of((run / "figures/convergence-test.svg").read_text())
    assert {"local", "apfl", "round", "mean test accuracy (%)"} <= set(words)


def test_a_choice_of_the_page_is_a_file_each(make_run: MakeRun) -> None:
    parts = compared([make_run(methods=("fedsdg",))])
    found = figures.sections(parts[0], parts[1], parts[3], parts[2])
    names = [name for name, *_ in figures._charts(list(found), parts[3])]
    of_seeds = {
        f"{name}-seed-{k}" for name in ("fedsdg-clients-by-round", "labels") for k in (0, 1)
    }
    assert of_seeds <= set(names)


def test_files_of_methods_whose_names_look_alike_differ(make_run: MakeRun) -> None:
    runs = [make_run(name, methods=("apfl",), seeds=(0,)) for name in ("a b", "a-b")]
    for run in runs:
        diagnose(run, "apfl", 4, "mix", np.array([0.2, 0.9]))
    found, comparison, of, shown, _ = compared(runs)
    parts = list(figures.sections(found, comparison, shown, of))
    names = [name for name, *_ in figures._charts(parts, shown)]
    assert len(names) == len(set(names))


def test_a_picture_has_the_clients_of_the_last_round_the_largest_first(make_run: MakeRun) -> None:
    run = make_run(methods=("apfl",), seeds=(0,))
    for when, values in ((2, np.full(3, 0.5)), (4, np.array([0.2, 0.9, 0.4]))):
        diagnose(run, "apfl", when, "mix", values)
    rows = rows_of(run, "picture-0")
    assert [(row["name"], row["place"]) for row in rows] == [("1", 1), ("2", 2), ("0", 3)]
    assert [row["value"] for row in rows] == pytest.approx([0.9, 0.4, 0.2], abs=1e-4)


def test_labels_are_counted_by_client_and_class_in_the_page_s_order(make_run: MakeRun) -> None:
    rows = rows_of(make_run(seeds=(0,)), "labels")
    assert [row["name"] for row in rows[::3]] == list("012345")
    assert [row["count"] for row in rows[:3]] == [60, 0, 0]
    assert rows[-1] == {"name": "5", "class": "c", "count": 20}


def test_clients_of_a_language_model_stand_by_their_number_of_examples(make_run: MakeRun) -> None:
    run = make_run(seeds=(0,), is_lm=True)
    sizes = [(row["name"], row["train"]) for row in rows_of(run, "sizes")]
    assert sizes == [(str(k), 60 - 10 * k) for k in range(6)]
    found, comparison, of, shown, _ = compared([run])
    assert "sizes" in [name for name, *_ in figures._charts(
        list(figures.sections(found, comparison, shown, of)), shown)]  # fmt: skip


def test_the_confusion_is_that_of_the_reported_rounds(make_run: MakeRun) -> None:
    run = make_run(methods=("fedsdg",))
    for seed in (0, 1):
        counts = np.zeros((6, 3, 3), np.int32)
        counts[:, 0, 0], counts[:, 0, 2] = 1, 1 + seed
        for number, factor in ((4, 1), (8, 100)):  # round 4 is reported
            name = f"methods/fedsdg/seed-{seed}/confusion-{number:06d}.safetensors"
            save_file({"personal/test": factor * counts, "personal/clients": np.arange(6)},
                      run / name)  # fmt: skip
    shares = {(row["true"], row["predicted"]): row["share"] for row in rows_of(run, "confusion")}
    assert shares["a", "a"] == pytest.approx(100 * 12 / 30)  # six clients with two seeds
    assert shares["a", "c"] == pytest.approx(100 * 18 / 30)


@pytest.mark.slow
def test_files_have_the_light_colours_of_the_page(make_run: MakeRun) -> None:
    (entry,) = entries([read(make_run(methods=("fedavg",), seeds=(0,)))])
    assert groups([entry])
    value = 100 * np.mean([x for x in correct("fedavg", 0, "test", 4, "personal") if x is not None])
    row = {"method": "fedavg", "split": "test", "round": 4, "value": value, "std": 0, "reported": 1}
    spec = curves(["fedavg"], "accuracy", "test")
    spec["params"][0]["value"] = ["fedavg"]
    text = svg(spec | {"datasets": {"curves": [row, row | {"round": 6}]}})
    assert f'stroke="{COLOURS[0]}"' in text
    assert 'fill="#ffffff"' in text
    assert "--" not in text
    assert text == svg(spec | {"datasets": {"curves": [row, row | {"round": 6}]}})


def test_48_methods_look_different() -> None:
    labels = [str(k) for k in range(48)]
    line = curves(labels, "accuracy", "test")["layer"][1]["encoding"]
    colours = LOOK["range"]["category"]
    looks = [(colours[k % 12], str(dash)) for k, dash in enumerate(
        line["strokeDash"]["scale"]["range"])]  # fmt: skip
    assert len(set(looks)) == 48
    assert len(set(COLOURS)) == len(set(DARK)) == len(colours) == 12


def test_without_the_extra_a_line_says_how_to_install_it(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    run = make_run(seeds=(0,))
    assert main(["report", str(run), "--figures", str(run / "figures")]) == 2
    said = "fedtailor: figures need vl-convert-python: pip install 'fedtailor[figures]'\n"
    assert capsys.readouterr().err == said
    assert not (run / "figures").exists()
