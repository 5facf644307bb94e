"""One table of five methods and ten baselines on four data sets: docs/cross.md, docs/cross.csv, the
figure, and the short form in README.md.

    python -m evidence.cross

No number is written by hand: they stand in results.jsonl. What has no line is not run.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evidence.cross_cells import (
    BASELINES,
    DATA,
    FILE,
    SEEDS,
    SYSTEMS,
    Cell,
    Data,
    best,
    cells,
)
from evidence.map_cells import not_defaults
from evidence.map_tuning import ends
from evidence.markdown import markdown_table
from evidence.rates import trials
from evidence.run import HERE, NO_ENDS
from fedtailor.report.drawing import COLOURS, svg
from fedtailor.report.names import in_prose

PAGE = HERE.parent / "docs/cross.md"
TABLE = HERE.parent / "docs/cross.csv"
FIGURE = HERE.parent / "docs/images/cross.svg"
README = HERE.parent / "README.md"
BEGIN, END = "<!-- cross: evidence/cross.py -->", "<!-- end of cross -->"


def page(found: Sequence[Cell]) -> str:
    """The page, as Markdown."""
    parts = [_HEAD, crossed(found, SYSTEMS + BASELINES, spread=True), _progress(found)]
    parts += [] if all(cell.has_ends for cell in found) else [f"{NO_ENDS}\n"]
    parts += [_COSTS, _costs(found), *(_about(data, _of(found, data)) for data in DATA)]
    return "\n".join([*parts, _TAIL.replace("BUDGET", _budget(found))])


def _budget(found: Sequence[Cell]) -> str:
    """How many trials the methods had on each data set, and where the best rates lie."""
    counts, tried, done = [], {}, trials()
    for data in DATA:
        if data.tuned_on is not None:
            continue
        of = [cell for cell in _of(found, data) if not cell.reason]
        (count,) = {cell.trials[1] for cell in of}
        counts.append(f"{count} on {data.name}")
        if all(cell.trials[0] == count for cell in of):
            base = data.settings or ("rounds=5",)
            tried[data.name] = {cell.method: done[FILE, base, cell.method] for cell in of}
    return (
        "- **Budget**: each method's settings are the best of the same number of trials on "
        "validation data: "
        f"{in_prose(counts)}. On newsgroups a trial has five rounds. Reuters has the rates of 20 "
        f"Newsgroups. The trials have seed 10, which no row has. {ends(tried)}"
    )


def crossed(found: Sequence[Cell], methods: Sequence[str], spread: bool = False) -> str:
    """Methods by data sets: the scores, the best in bold type, with their spread over seeds."""
    bold = {data: best(_of(found, data)) for data in DATA}
    by = {(cell.data, cell.method): cell for cell in found}
    rows = []
    for method in methods:
        shown = [
            f"**{score}**" if method in bold[data] else score
            for data in DATA
            for score in [_score(by[data, method], spread)]
        ]
        rows.append([method, *shown])
    return markdown_table(["method", *(f"{data.name}, {data.measure}" for data in DATA)], rows)


def _score(cell: Cell, spread: bool) -> str:
    """The mean; in brackets what it lacks."""
    if cell.missing:
        return cell.missing
    few = "" if len(cell.lines) == len(SEEDS) else f" ({len(cell.lines)} of {len(SEEDS)} seeds)"
    done, of = cell.trials
    untuned = "" if done == of else f" ({done} of {of} trials)"
    numbers = cell.numbers()
    sd = f" ± {_shown(numbers['sd_over_seeds'], 1)}" if spread else ""
    return f"{_shown(numbers['mean'], 1)}{sd}{few}{untuned}"


def _progress(found: Sequence[Cell]) -> str:
    possible = [cell for cell in found if cell.missing != "n/a"]
    done = sum(cell.is_complete for cell in possible)
    return (
        f"\n{done} of {len(possible)} scores rest on three seeds, and on all trials of the rate.\n"
    )


def _costs(found: Sequence[Cell]) -> str:
    """Methods by data sets: the bytes of a client and round, and the processor time."""
    by = {(cell.data, cell.method): cell for cell in found}
    rows = []
    for method in SYSTEMS + BASELINES:
        row = [method]
        for data in DATA:
            if by[data, method].missing:
                row += ["", ""]
            else:
                x = by[data, method].numbers()
                row += [_shown(x["bytes_client_round"], 0, 1e3), _shown(x["cpu_seconds"], 0)]
        rows.append(row)
    header = ["method", *(f"{data.name}, {unit}" for data in DATA for unit in ("kB", "CPU s"))]
    return markdown_table(header, rows) + "\n"


def _about(data: Data, of: Sequence[Cell]) -> str:
    """A data set's model and clients, and which methods it lacks."""
    why: dict[str, list[str]] = {}
    for cell in of:
        if cell.missing:
            why.setdefault(cell.reason or cell.missing, []).append(cell.method)
    lacks = "".join(f" {', '.join(names)}: {reason}." for reason, names in why.items())
    return f"- **{data.name}**: {data.model}, {data.clients}.{lacks}"


def _shown(value: float | None, digits: int, unit: float = 1.0) -> str:
    return "–" if value is None else f"{value / unit:,.{digits}f}"


def _of(found: Sequence[Cell], data: Data) -> list[Cell]:
    return [cell for cell in found if cell.data == data]


def table(found: Sequence[Cell]) -> str:
    """Everything as CSV, a line a cell."""
    rows: list[dict[str, Any]] = []
    for cell in found:
        row: dict[str, Any] = {
            "data": cell.data.name,
            "model": cell.data.model,
            "clients": cell.data.clients,
            "method": cell.method,
            "measure": cell.data.measure,
            "seeds": len(cell.lines),
            "trials": cell.trials[0],
            "trials_planned": cell.trials[1],
            "missing": cell.reason or cell.missing,
        }
        if not cell.missing:
            (settings,) = next(iter(cell.lines.values()))["settings"]["methods"]
            numbers = {name: _plain(value) for name, value in cell.numbers().items()}
            row |= {**numbers, "settings": " ".join(not_defaults(settings))}
        rows.append(row)
    names = list(dict.fromkeys(name for row in rows for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _plain(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if value < 1e4 else f"{value:.0f}"


def short(found: Sequence[Cell]) -> str:
    """What the README shows: a table once two data sets are complete, a link before."""
    ready = [
        data
        for data in DATA
        if all(cell.is_complete for cell in _of(found, data) if cell.missing != "n/a")
    ]
    link = "[Fifteen methods on four data sets](docs/cross.md)"
    if len(ready) < 2:
        return f"{link}, all with the same budget; the page says which runs are missing."
    shown = (*SYSTEMS, "local", "fedavg", "fedavg-ft", "fedper", "fedrep")
    no_ends = "" if all(cell.has_ends for cell in found) else f"\n{NO_ENDS}"
    return f"{link}, in short:\n\n{crossed(found, shown)}\n\n{_LEGEND}{no_ends}"


def with_short(text: str, found: Sequence[Cell]) -> str:
    """The README's text with the short form between the markers."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{short(found)}\n{END}{after}"


def draw(found: Sequence[Cell], path: Path) -> None:
    """For each data set the mean of each method as a dot, and a line to its worst tenth."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(svg({"hconcat": [_panel(data, _of(found, data)) for data in DATA]}))


def _panel(data: Data, of: Sequence[Cell]) -> dict[str, Any]:
    measured = [
        {"method": cell.method, "mean": x["mean"], "decile": x["decile"],
         "colour": COLOURS[cell.method in SYSTEMS],
         "fill": COLOURS[cell.method in SYSTEMS] if cell.is_complete else "white"}
        for cell in of if not cell.missing for x in [cell.numbers()]
    ]  # fmt: skip
    axis = {"title": None, "grid": False, "ticks": False, "labels": data == DATA[0]}
    scale = {"domain": SYSTEMS + BASELINES}
    y = {"field": "method", "type": "nominal", "axis": axis, "scale": scale}
    title = "perplexity" if data.is_text else "accuracy (%)"
    x = {"field": "mean", "type": "quantitative", "title": title, "scale": {"zero": False}}
    colour = {"field": "colour", "type": "nominal", "scale": None}
    layers = [
        {"mark": "rule", "encoding": {"x": x, "x2": {"field": "decile"}, "color": colour}},
        {"mark": {"type": "point", "size": 55, "opacity": 1},
         "encoding": {"x": x, "stroke": colour, "fill": {**colour, "field": "fill"}}},
        {"data": {"values": [{"method": c.method, "why": c.missing} for c in of if c.missing]},
         "mark": {"type": "text", "align": "left", "color": "#777777"},
         "encoding": {"x": {"value": 4}, "text": {"field": "why"}}},
    ]  # fmt: skip
    return {"title": data.name, "width": 190, "height": {"step": 20},
            "data": {"values": measured}, "encoding": {"y": y},
            "layer": layers if measured else layers[2:]}  # fmt: skip


_LEGEND = """\
The page has five more baselines. Accuracies are in percent, higher is better; of the perplexity
lower is better. **Bold**: the best of all 15 methods, and those that can't be told from it. n/a:
the method does not suit the network, or a run takes half an hour."""

_HEAD = """# Fifteen methods on four data sets

How good is each method, and what does it cost? The first five are the main methods of this library,
the others baselines. On a data set all have the same clients, rounds, batches and model. **Bold**:
the best, and those that can't be told from it. *n/a*: not planned, for reasons below.
"""

_COSTS = """Kilobytes that a client sends and receives in a round, and the processor time of a whole
run, evaluation included:
"""

_TAIL = """
## How it was measured

- **accuracy**: the mean over clients of each client's own model on its own test examples, in
  percent, then over seeds. **perplexity**: exp of the mean over clients of the loss a token; lower
  is better. **±**: the standard deviation over seeds. **Bold**: the 95 % interval of the difference
  to the best, over clients and seeds, contains 0.
- **LoRA** is on the last two of MiniLM's six blocks and on the last five of SmolLM2's 30. **FedSQ**
  trains whole blocks on texts.
BUDGET
- **Seeds**: 0, 1 and 2. A seed divides the data anew, or draws other senders. Each run had one
  process of an x86-64 machine with 2 cores and no GPU.

[cross.csv](cross.csv) has memory and FLOPs, too.
[To repeat the runs](evidence.md), take a preset of `fedtailor run map`: `images`,
`reuters`, `chat`, or none for 20 Newsgroups.

![The mean and the worst tenth of each method on each data set](images/cross.svg)

A line goes from a method's mean to its worst tenth. Orange are the five main methods.
"""


def main() -> None:
    """Write the page, the table, the figure and the README's part."""
    found = cells()
    PAGE.write_text(page(found))
    TABLE.write_text(table(found))
    README.write_text(with_short(README.read_text(), found))
    draw(found, FIGURE)


if __name__ == "__main__":
    main()
