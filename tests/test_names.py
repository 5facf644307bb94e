"""Names reach every output as they are: none is read as a command of its markup."""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
import tomli_w
from markdown_it import MarkdownIt
from rich.console import Console

import fedtailor as ft
from fedtailor.cli import main
from fedtailor.cli.new import _columns
from fedtailor.data.survey import Roles, survey
from fedtailor.errors import InputError
from fedtailor.export.card import _yaml, card
from fedtailor.inference.rows import as_csv
from fedtailor.report import figures, page
from fedtailor.report.charts.specs import losses
from fedtailor.report.comparison import to_text
from fedtailor.report.drawing import svg
from fedtailor.report.flat import to_csv
from fedtailor.report.sections import chart_specs
from fedtailor.report.table import table
from fedtailor.report.text import TextTable, markdown, option
from fedtailor.runs.draft import draft
from fedtailor.store.read import read
from fedtailor.watch.lines import changes
from fedtailor.watch.state import RunState, TrialState
from fedtailor.watch.terminal import View
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


def expressions(spec: object) -> Iterator[str]:
    """What Vega computes in a chart."""
    if isinstance(spec, dict):
        for key, value in spec.items():
            if key in ("filter", "test", "calculate", "expr", "labelExpr", "field"):
                yield str(value)
            yield from expressions(value)
    elif isinstance(spec, list):
        for value in spec:
            yield from expressions(value)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "a_$5_$ [bold]", LABELS)


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("drawn")
    return page.write(write_run(folder / "run", DRAWN), folder / "page.html").read_text("utf-8")


def words_of(figure: str) -> set[str]:
    """The words in a figure, without the end of those that are too long."""
    found = (unescape(words) for words in re.findall(r">([^<>\n]+)</text>", figure))
    return {words.partition("…")[0] for words in found}


def lacking(names: Sequence[str], figure: str) -> set[str]:
    """The names that do not stand in a figure, whole or cut off at the end."""
    words = words_of(figure) - {""}
    return {name for name in names if not any(name.startswith(word) for word in words)}


@pytest.mark.slow
def test_figures_write_names_as_they_are(tmp_path: Path) -> None:
    spec = losses(NAMES)
    spec["params"][0]["value"] = NAMES
    rows = [{"method": one, "round": 1, "value": 1.0} for one in NAMES]
    text = svg(spec | {"datasets": {"losses": rows}})
    assert {name for name in NAMES if len(name) < 200} <= words_of(text)
    assert lacking(NAMES, text) == set()
    _, comparison, _, shown, _ = page.compared(write_run(tmp_path / "run", DRAWN))
    specs = chart_specs(comparison, shown)
    specs["clients"]["params"][0]["value"] = DRAWN
    of_labels = figures._rows_of("labels", 0, shown)
    for chart, rows, names in (("clients", figures._fixed(shown), DRAWN),
                               ("labels", of_labels, CLASSES)):  # fmt: skip
        assert lacking(names, svg(specs[chart] | {"datasets": rows})) == set()


class Elements(HTMLParser):
    """The tags of a page, and the texts of its cells."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: set[str] = set()
        self.scripts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        if self.tags[-1:] == ["script"] and data.strip():
            self.scripts.append(data)
        self.texts.add(data)


@pytest.mark.slow
def test_a_page_has_names_as_text_and_as_data_alone(html: str) -> None:
    found = Elements(html)
    assert found.tags.count("script") == 5
    assert "img" not in found.tags
    assert set(NAMES) | set(DRAWN) <= found.texts
    content, specs = (json.loads(found.scripts[k]) for k in range(2))
    assert content["methods"] == ["local", *DRAWN]
    assert content["groups"][0]["names"] == list(NAMES)
    assert content["groups"][0]["classes"] == list(CLASSES)
    assert not [text for text in expressions(specs) if any(name in text for name in DRAWN)]


@pytest.mark.slow
def test_tables_for_people_and_programs_hold_names(run: Path) -> None:
    comparison = table([read(run)])
    shown = to_text(comparison)
    assert all(re.search(rf"^{re.escape(label)} ", shown, re.M) for label in LABELS)
    rows = list(csv.DictReader(io.StringIO(to_csv(comparison))))
    assert not [row for row in rows if row["label"].startswith(("=", "+", "-", "@"))]
    assert {row["label"].removeprefix("'") for row in rows} == {"local", *LABELS}


def test_a_table_for_latex_gives_the_names_back() -> None:
    cells = [[one, "1"] for one in NAMES]
    text = TextTable("A", ["m", "x"], cells, frozenset((y, 1) for y in range(len(cells)))).latex()
    lines = text.splitlines()[text.splitlines().index("\\midrule") + 1 :][: len(NAMES)]
    assert not [line for line in lines if line.lstrip().startswith(("[", "*"))]  # read as arguments
    assert all(line.endswith(" \\textbf{1} \\\\") for line in lines)
    written = {"\\textbackslash{}": "\\", "\\textasciitilde{}": "~", "\\^{}": "^", "{[}": "["}
    written |= {"{*}": "*", "\\ensuremath{<}": "<", "\\ensuremath{>}": ">"}
    written |= {f"\\{c}": c for c in "&%$#_{}"}
    symbols = re.compile("|".join(map(re.escape, written)))
    assert [
        symbols.sub(lambda m: written[m[0]], re.split(r"(?<!\\)&", line)[0].strip())
        for line in lines
    ] == list(NAMES)


def test_predictions_come_back_from_their_csv_file() -> None:
    objects = [
        {"text": one, "client": one, "label": one, "probabilities": dict.fromkeys(NAMES, 0.5)}
        for one in NAMES
    ]
    lines = io.StringIO("\n".join(as_csv(objects)))
    back = pd.read_csv(lines, dtype=str, keep_default_na=False)
    for column in ("text", "client", "label"):
        assert back[column].tolist() == list(NAMES)
    assert list(back.columns)[3:] == [f"p({one})" for one in NAMES]


MARKDOWN = MarkdownIt("commonmark").enable(["table", "strikethrough"])


@pytest.mark.parametrize("one", NAMES)
def test_markdown_and_yaml_have_names_as_text(one: str) -> None:
    (cell, text) = (
        token.children or []
        for token in MARKDOWN.parse(f"| {markdown(one)} |\n|---|\n\na {markdown(one)}")
        if token.type == "inline"
    )
    assert [(token.type, token.content) for token in cell] == [("text", one)]
    assert [(token.type, token.content) for token in text] == [("text", f"a {one}")]
    yaml = pytest.importorskip("yaml")
    assert yaml.safe_load(f"a: {_yaml(one)}") == {"a": one}


@pytest.mark.parametrize("one", NAMES)
def test_a_model_card_has_a_row_for_each_fact(one: str) -> None:
    data = ft.DataConfig(path=one)
    experiment = ft.Experiment({"fedavg": ft.METHODS["fedavg"]()}, name="a", data=data)
    about = {
        "label": "fedavg", "method": "fedavg", "clients": 7, "client": one, "seed": 0,
        "base": {"name": one, "licence": one, "get": None}, "form": "plain", "modality": "image",
        "task": "classification", "network": {"kind": "cnn"}, "id2label": {"0": one, "1": one},
        "max_length": None,
    }  # fmt: skip
    tokens = MARKDOWN.parse(card(experiment, about, [], None).partition("---\n\n")[2])
    inline = [token.children or [] for token in tokens if token.type == "inline"]
    assert {child.type for of in inline for child in of} == {"text", "code_inline"}
    assert inline[0][0].content in (f"a: the model of {one}", f"a: the model of client {one}")
    cells = [of[0].content for of in inline if of]
    for what, said in (("data", one), ("base model", one), ("classes", f"{one}, {one}")):
        assert cells[cells.index(what) + 1].partition(", divided")[0] == said


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow(["words", *NAMES])
        lines.writerows([[f"some words {k}", *["ab"[k % 2]] * len(NAMES)] for k in range(40)])
    return path


def test_the_draft_of_an_experiment_has_names_of_columns_and_its_own(rows: Path) -> None:
    found = survey(str(rows))
    for title, label, client in zip(LABELS[::3], NAMES[1::3], NAMES[2::3], strict=False):
        text = draft(found, Roles("words", label, client), title, "minilm", ["fedavg"])
        content = tomllib.loads(text)
        assert content["name"] == title
        assert (content["data"]["label"], content["data"]["client"]) == (label, client)
    shown = _columns(found)
    assert all(f"\n{one} " in shown for one in NAMES)


@pytest.mark.parametrize("name", ["a\nb = 1", "a\x7f", "a\udcff"])
def test_a_draft_refuses_a_name_that_is_no_line(rows: Path, name: str) -> None:
    roles = Roles("words", NAMES[0], NAMES[1])
    with pytest.raises(InputError, match=r"experiment 'a.* can't name a folder"):
        draft(survey(str(rows)), roles, name, "minilm", ["fedavg"])


def test_a_printed_command_gives_names_to_its_options() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--client")
    for one in NAMES:
        command = shlex.join(option("--client", one))
        assert parser.parse_args(shlex.split(command)).client == one


def test_an_options_value_that_argparse_drops_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["predict", "run", "--client=--", "--input", "x.csv"]) == 2
    assert capsys.readouterr().err.startswith("fedtailor: --client=--: -- can't be an option's")


def test_watch_shows_names_in_lines_and_in_the_terminal() -> None:
    parts = tuple(TrialState(one, 0, "running", 1, 2, lately=(f"{one}: slow",)) for one in NAMES)
    state = RunState("r", "[/]", "running", "accuracy", 1, 2, None, parts, NAMES, None)
    lines = "\n".join(changes(None, state))
    terminal = Console(file=io.StringIO(), width=400, height=100)
    terminal.print(View(state))
    shown = terminal.file.getvalue()
    for one in NAMES:
        assert f"{one}, seed 0: {one}: slow" in lines
        assert re.search(rf"^ *{re.escape(one)} +0 +1/2 ", shown, re.M), one


@pytest.mark.slow
def test_a_run_goes_from_its_file_to_predictions_and_exports(tmp_path: Path) -> None:
    rows = [
        (f"{one} is {label}, {k}", label, one)
        for one in NAMES
        for k, label in enumerate((*CLASSES[:4], *CLASSES[:4], *CLASSES[4:]))
        if k < 8 or one == NAMES[0]
    ]
    data = tmp_path / "rows.csv"
    pd.DataFrame(rows, columns=["te|xt", "=label", "-client"]).to_csv(data, index=False)
    run = tmp_path / "runs $(x)"
    methods = {label: {"name": "local", "trainable": "head"} for label in ("_$5_$", "--help")}
    experiment = {
        "name": "$5$ <b>", "rounds": 1, "seeds": [0], "methods": methods,
        "data": {"path": str(data), "text": "te|xt", "label": "=label", "client": "-client",
                 "max_length": 16},
        "split": {"scheme": "natural", "min_examples": 5}, "model": {"name": "minilm"},
        "local": {"steps": 1},
    }  # fmt: skip
    file = tmp_path / "experiment.toml"
    file.write_text(tomli_w.dumps(experiment), "utf-8")
    assert main(["run", str(file), "--out", str(run)]) == 0
    for command in ("report", "compare", "compare --csv", "compare --latex", "compare --json",
                    "watch --once", "watch --once --json", "check"):  # fmt: skip
        words = command.split()
        assert main([words[0], str(run), *words[1:]]) == 0
    assert set(NAMES) <= Elements((run / "report.html").read_text("utf-8")).texts
    out = tmp_path / "predicted.csv"
    method = ["predict", str(run), "--method=--help", "--input", str(data), "--out", str(out)]
    assert main([*method, "--by-client", "--keep", "te|xt"]) == 0
    back = pd.read_csv(out, dtype=str, keep_default_na=False)
    assert list(zip(back["te|xt"], back["client"], strict=True)) == [(x, c) for x, _, c in rows]
    assert set(back["label"]) <= set(CLASSES)
    every = tmp_path / "every"
    assert main(["export", str(run), "--method=_$5_$", "--all-clients", "--out", str(every)]) == 0
    assert len(list(every.iterdir())) == len(NAMES) + 1  # and the base model
    for one in ("-1+2", "../x"):
        assert main([*method, *option("--client", one)]) == 0
        folder = tmp_path / f"export-{NAMES.index(one)}"
        whose = ["--method=_$5_$", *option("--client", one)]
        assert main(["export", str(run), *whose, "--out", str(folder)]) == 0
        assert f"the model of {markdown(one)}\n" in (folder / "README.md").read_text("utf-8")
