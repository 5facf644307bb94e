"""Names from pieces of markup: each output gives them back as they are, or refuses them."""

from __future__ import annotations

import argparse
import csv
import io
import random
import re
import shlex
from html import unescape
from pathlib import Path

import yaml
from markdown_it import MarkdownIt
from rich.console import Console

from fedtailor.data.names import check_names
from fedtailor.export.card import _yaml
from fedtailor.inference.rows import as_csv
from fedtailor.report.charts.specs import losses
from fedtailor.report.drawing import svg
from fedtailor.report.text import TextTable, inert, markdown, option
from fedtailor.watch.state import RunState, TrialState
from fedtailor.watch.terminal import View

from .mutations import Attempt, Change, read

_PIECES = (
    *"_$\\|&%#{}~^<>[]()*`'\"=+-@/.:;,!?\u00e9\u0301\u200d\u202e\x1b\x7f a0",
    "$5$", "\\frac{", "[bold]", "[/]", ":smile:", "-1", "<b>", "&lt;", "&#60;", "__proto__", "NaN",
    "null", "yes", "1e5", "http://b", "../", "{{", "--", "**", "\U0001f600", "\u0645\u0631",
)  # fmt: skip
_MARKDOWN = MarkdownIt("commonmark").enable(["table", "strikethrough"])
_FIGURES = 0.1  # of the names are drawn, which takes most time


def names(folder: Path) -> Attempt:
    """Write names that `check_names` lets through into each output, and read them back."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--client")

    def attempt(rng: random.Random) -> Change:
        name = "".join(rng.choices(_PIECES, k=rng.randint(1, 6))).strip() or "a"
        read(lambda: check_names("client", [name]))
        _check_texts(name)
        words = shlex.split(shlex.join(option("--client", name)))
        if name != "--":  # which argparse of Python 3.11 drops
            _same("command", parser.parse_args(words).client, name)
        if rng.random() < _FIGURES:
            _check_figure(name)
        return Change(name)

    return attempt


def _same(where: str, back: object, name: str) -> None:
    if back != name:
        raise AssertionError(f"{where}: {back!a}, not {name!a}")


def _check_texts(name: str) -> None:
    heads = _MARKDOWN.parse(f"| {markdown(name)} | b |\n|---|---|\n")
    cells = [token.children or [] for token in heads if token.type == "inline"]
    _same("Markdown", "".join(f"{t.content}{t.tag}" for t in cells[0]), name)
    _same("YAML", yaml.safe_load(f"a: {_yaml(name)}")["a"], name)
    line = list(as_csv([{"label": name}]))[1]
    _same("predictions", next(csv.reader(io.StringIO(line)))[0], name)
    cell = inert(name)
    _same("table", cell.removeprefix("'") if cell != name else cell, name)
    table = TextTable("A", ["m", "x"], [[name, "1"]], frozenset({(0, 1)})).latex().splitlines()
    row = table[table.index("\\midrule") + 1].lstrip()
    if row.startswith(("[", "*")) or not row.endswith("\\textbf{1} \\\\"):
        raise AssertionError(f"LaTeX: {row!a}")
    part = TrialState(name, 0, "running", 1, 2)
    state = RunState("r", name, "running", "accuracy", 1, 2, None, (part,), (name,), None)
    console = Console(file=io.StringIO(), width=300)
    console.print(View(state))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    if not re.search(rf"^ *{re.escape(name)} +0 +1/2 ", shown, re.MULTILINE):
        raise AssertionError(f"terminal: {name!a} is not in {shown!a}")


def _check_figure(name: str) -> None:
    spec = losses([name])
    spec["params"][0]["value"] = [name]
    text = svg(spec | {"datasets": {"losses": [{"method": name, "round": 1, "value": 1.0}]}})
    if name not in map(unescape, re.findall(r">([^<>\n]+)</text>", text)):
        raise AssertionError(f"figure: {name!a} is not in it")
