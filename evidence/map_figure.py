"""The figure of docs/when.md: how far each method is ahead of training alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evidence.cross_cells import SEEDS
from evidence.map_cells import ALONE
from fedtailor.report.drawing import COLOURS, SHAPES, svg

_DODGE = 0.012  # how far two methods' points stand apart, as a share of the axis
_LEAD = "points over training alone"

Json = dict[str, Any]


def draw(found: Sequence[Mapping[str, Any]], path: Path, titles: Mapping[str, str]) -> None:
    """Draw each data set: against the clients' label overlap and against their examples; one with a
    single setting as a row for each method. Intervals are drawn, and points that rest on fewer
    seeds than planned are hollow."""
    names = sorted({name for cell in found for name in cell["methods"]} - {ALONE})
    by_data: dict[str, list[Mapping[str, Any]]] = {}
    for cell in found:
        by_data.setdefault(cell["data"], []).append(cell)
    panels: list[Json] = []
    for data, of in by_data.items():
        title = titles.get(data, data)
        if len(of) == 1:
            panels.append({"title": title, **_rows(of[0], names)})
            continue
        base = min(of, key=lambda cell: len(cell["settings"]))
        first = _lines(_alike(of, base, "overlap"), "label_overlap", names)
        second = _lines(_alike(of, base, "size"), "median_examples", names)
        panels += [{"title": title, **first}, second]
    path.parent.mkdir(exist_ok=True)
    path.write_text(svg({"vconcat": panels}))


def _alike(
    of: Sequence[Mapping[str, Any]], base: Mapping[str, Any], varied: str
) -> list[Mapping[str, Any]]:
    """The settings that differ from ``base`` in their clients' overlap, or in their size, alone."""
    size = base["clients"]["median_examples"]
    near = [cell for cell in of if cell["clients"]["number"] == base["clients"]["number"]]
    if varied == "overlap":
        return [c for c in near if abs(c["clients"]["median_examples"] / size - 1) < 0.2]
    return [c for c in near if c["alpha"] == base["alpha"]]


def _lines(found: Sequence[Mapping[str, Any]], key: str, names: Sequence[str]) -> Json:
    """A line for each method over the settings, which stand at their place on the axis."""
    found = sorted(found, key=lambda cell: cell["clients"][key])
    used = [name for name in names if any(name in cell["methods"] for cell in found)]
    places = [cell["clients"][key] for cell in found]
    is_log = key == "median_examples"
    ratio, span = places[-1] / places[0], places[-1] - places[0]
    rows = []
    for number, name in enumerate(used):
        aside = (number - (len(used) - 1) / 2) * _DODGE
        for place, cell in zip(places, found, strict=True):
            if name in cell["methods"]:
                at = place * ratio**aside if is_log else place + span * aside
                rows.append({"place": at, **_lead(name, cell["methods"][name])})
    axis: Json = {"title": "training examples a client", "values": places, "format": ".0f"}
    scale: Json = {"type": "log", "zero": False, "nice": False}
    if not is_log:
        axis = {"title": "label overlap of two clients", "format": ".0%", "tickCount": 10}
        scale = {"zero": False}
    scale["padding"] = 12
    x = {"field": "place", "type": "quantitative", "axis": {"grid": False, **axis}, "scale": scale}
    y = {"type": "quantitative", "scale": {"zero": True}}
    line = {"mark": {"type": "line", "strokeWidth": 0.8, "opacity": 0.6},
            "encoding": {"x": x, "y": {"field": "lead", "title": _LEAD, **y},
                         "color": _colour(names)}}  # fmt: skip
    return {"width": 520, "height": 250, "data": {"values": rows},
            "layer": [_zero("y"), line, *_points(x, "y", names)]}  # fmt: skip


def _rows(cell: Mapping[str, Any], names: Sequence[str]) -> Json:
    """A row for each method of one setting, the best at the top."""
    rows = [_lead(name, of) for name, of in cell["methods"].items() if name != ALONE]
    y = {"field": "method", "type": "nominal", "sort": None, "axis": {"title": None}}
    return {"width": 520, "height": {"step": 18}, "data": {"values": rows},
            "layer": [_zero("x"), *_points(y, "x", names)]}  # fmt: skip


def _zero(along: str) -> Json:
    """The line of training alone."""
    return {
        "data": {"values": [{}]},
        "mark": {"type": "rule", "color": "#999999"},
        "encoding": {along: {"datum": 0, "type": "quantitative"}},
    }


def _points(place: Json, along: str, names: Sequence[str]) -> list[Json]:
    """Leads with their intervals; hollow where they rest on few seeds."""
    other = "y" if along == "x" else "x"
    value: Json = {"type": "quantitative", "title": _LEAD}
    interval = {
        "mark": {"type": "rule", "strokeWidth": 0.8},
        "encoding": {other: place, along: {"field": "low", **value},
                     f"{along}2": {"field": "high"}, "color": _colour(names)},
    }  # fmt: skip
    shapes = [SHAPES[k % len(SHAPES)] for k in range(len(names))]
    shape = {**_colour(names), "scale": {"domain": names, "range": shapes}}
    lead = {other: place, along: {"field": "lead", **value}, "shape": shape}
    mark = {"type": "point", "size": 45, "opacity": 1}
    points = [
        {"transform": [{"filter": test}], "mark": mark | fill,
         "encoding": {**lead, "stroke": _colour(names), **encoding}}
        for test, fill, encoding in (
            ("!datum.few", {}, {"fill": _colour(names)}), ("datum.few", {"fill": "white"}, {})
        )
    ]  # fmt: skip
    return [interval, *points]


def _colour(names: Sequence[str]) -> Json:
    scale = {"domain": names, "range": COLOURS[: len(names)]}
    return {
        "field": "method",
        "type": "nominal",
        "scale": scale,
        "legend": {"title": None, "columns": 1},
    }


def _lead(name: str, method: Mapping[str, Any]) -> Json:
    lead, low, high = (100 * x for x in method["over_alone"])
    few = len(method["seeds"]) < len(SEEDS)
    return {"method": name, "lead": lead, "low": low, "high": high, "few": few}
