"""The charts as Vega-Lite specifications.

Data go by name and are filled in by the page's script, and so are the colours, which follow the
reader's theme. Each chart has the parameters ``shown`` (labels of methods), ``focus`` (a label, or
null), ``outer`` (pixels, of its place) and, where it has clients, ``picked`` (a client's key, or
null).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..costs import COSTS
from ..drawing import COLOURS, DASHES, SHAPES, WIDTH
from ..select import Metric, higher_is_better, is_percentage, unit_of
from .content import Json

_SHOWN = {"filter": "indexof(shown, datum.method) >= 0"}
_ROUNDS = {"title": "round", "tickMinStep": 1, "format": "d", "grid": False}
_OPACITY = {
    "condition": {"test": "focus == null || focus == datum.method", "value": 1},
    "value": 0.12,
}
_FAINT = {
    "condition": {"test": "focus == null || focus == datum.method", "value": 0.6},
    "value": 0.06,
}


def chart(name: str, description: str, height: int | Json, layers: Json) -> Json:
    """Return a chart of the data ``name``, as wide as its place in the page."""
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "description": description,
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "data": {"name": name},
        "params": [
            {"name": "shown", "value": []},
            {"name": "focus", "value": None},
            {"name": "picked", "value": None},
            {"name": "outer", "value": WIDTH},
        ],
        **layers,
    }


_OF_LINES = {"symbolType": "stroke", "symbolSize": 450, "symbolStrokeWidth": 2}
_OF_MARKS = {"symbolSize": 90, "symbolStrokeWidth": 0}


def _legend(labels: Sequence[str], look: Json) -> Json:
    """Which method is which, as a saved chart must say, in as many columns as fit."""
    limit = min(max(110, 8 * max(map(len, labels), default=0)), 300)
    columns = {"signal": f"max(1, floor((outer - 80) / {limit + 5}))"}
    names = {"values": {"expr": "shown"}, "labelLimit": limit, "columns": columns}
    return {"orient": "bottom", "title": None, "symbolOpacity": 1, **names, **look}


def _by(labels: Sequence[str], look: Sequence[Any] | None, legend: Json | None) -> Json:
    scale: Json = {"domain": list(labels)}
    if look is not None:
        turns = (k + k // len(COLOURS) for k in range(len(labels)))  # colours repeat, looks do not
        scale["range"] = [look[turn % len(look)] for turn in turns]
    legend = legend and _legend(labels, legend)
    return {"field": "method", "type": "nominal", "scale": scale, "legend": legend}


def _colour(labels: Sequence[str], legend: Json | None = None) -> Json:
    return _by(labels, None, legend)


def _dash(labels: Sequence[str], legend: Json) -> Json:
    return _by(labels, DASHES, legend)


def _shape(labels: Sequence[str]) -> Json:
    return _by(labels, SHAPES, _OF_MARKS)


def _measure(title: str, *, field: str = "value", grid: bool = True) -> Json:
    axis = {"title": title, "grid": grid}
    return {"field": field, "type": "quantitative", "scale": {"zero": False}, "axis": axis}


def tip(*fields: tuple[str, str, str]) -> list[Json]:
    """Fields of a tooltip: name, type (n, q, or s for a number with a prefix of the SI), title."""
    formats = {"q": ".4~g", "s": ".3~s"}
    kinds: Json = {"n": {"type": "nominal"}}
    kinds |= {kind: {"type": "quantitative", "format": of} for kind, of in formats.items()}
    return [{"field": name, "title": title, **kinds[kind]} for name, kind, title in fields]


def curves(labels: Sequence[str], metric: Metric, split: str) -> Json:
    """Means over clients by round, with a band of one deviation over seeds."""
    axis = f"mean {split} {metric}{unit_of(metric)}"
    x = {"field": "round", "type": "quantitative", "axis": _ROUNDS}
    colour, tooltip = _colour(labels, _OF_MARKS), tip(
        ("method", "n", "method"), ("round", "q", "round"), ("value", "q", axis),
        ("std", "q", "std over seeds"), ("reported", "q", "seeds that report this round"),
    )  # fmt: skip
    band = {
        "mark": {"type": "area", "opacity": 0.12, "interpolate": "linear"},
        "transform": [{"filter": "datum.std > 0 && (focus == null || focus == datum.method)"}],
        "encoding": {
            "x": x,
            "y": _measure(axis, field="low"),
            "y2": {"field": "high"},
            "color": colour,
        },
    }
    line = {
        "mark": {"type": "line", "strokeWidth": 2, "strokeCap": "butt"},
        "encoding": {
            "x": x,
            "y": _measure(axis),
            "color": colour,
            "strokeDash": _dash(labels, _OF_MARKS),
            "opacity": _OPACITY,
        },
    }
    reported = {
        "mark": {"type": "point", "size": 70, "strokeWidth": 2},
        "transform": [{"filter": "datum.reported > 0"}],
        "encoding": {
            "x": x,
            "y": _measure(axis),
            "color": colour,
            "shape": _shape(labels),
            "opacity": _OPACITY,
        },
    }
    touch = {
        "mark": {"type": "circle", "size": 160, "opacity": 0.001},
        "encoding": {"x": x, "y": _measure(axis), "tooltip": tooltip},
    }
    transform = [
        {"filter": f"datum.split == '{split}'"},
        _SHOWN,
        {"calculate": "datum.value - datum.std", "as": "low"},
        {"calculate": "datum.value + datum.std", "as": "high"},
    ]
    layers = {"transform": transform, "layer": [band, line, reported, touch]}
    return chart("curves", f"{axis} by round, a line a method", 280, layers)


def _by_method(ranked: Sequence[str]) -> Json:
    axis = {"title": None, "labelLimit": 180, "labelPadding": 8}
    axis |= {"grid": False, "ticks": False, "domain": False}
    return {"field": "method", "type": "nominal", "sort": list(ranked), "axis": axis}


def ahead(labels: Sequence[str], ranked: Sequence[str], metric: Metric) -> Json:
    """How far each method is ahead of training alone, with its interval."""
    unit = "points" if is_percentage(metric) else unit_of(metric).strip(" ()")
    axis = f"ahead of training alone ({unit or metric})"
    tooltip = tip(
        ("method", "n", "method"), ("value", "q", "ahead by"), ("low", "q", "95 % from"),
        ("high", "q", "to"), ("reading", "n", "these data show"),
        ("worseOff", "q", "clients worse off"), ("clients", "q", "of"),
    )  # fmt: skip
    zero = {
        "data": {"values": [{}]},
        "mark": {"type": "rule", "strokeDash": [4, 3]},
        "encoding": {"x": {"datum": 0, "type": "quantitative", "axis": {"title": axis}}},
    }
    y = _by_method(ranked)
    interval = {
        "transform": [_SHOWN, {"filter": "isValid(datum.low)"}],
        "mark": {"type": "rule", "strokeWidth": 3},
        "encoding": {
            "y": y,
            "x": _measure(axis, field="low"),
            "x2": {"field": "high"},
            "color": _colour(labels),
            "opacity": _OPACITY,
            "tooltip": tooltip,
        },
    }
    point = {
        "transform": [_SHOWN],
        "mark": {"type": "point", "filled": True, "size": 110, "opacity": 1},
        "encoding": {
            "y": y,
            "x": _measure(axis),
            "color": _colour(labels),
            "opacity": _OPACITY,
            "tooltip": tooltip,
        },
    }
    layers = {"layer": [zero, interval, point]}
    return chart("ahead", axis, {"step": 26}, layers)


def clients(labels: Sequence[str], ranked: Sequence[str], metric: Metric) -> Json:
    """The test result of every client with every method, over boxes of all clients."""
    axis = f"test {metric}{unit_of(metric)}"
    tooltip = tip(
        ("name", "n", "client"), ("group", "n", "of"), ("method", "n", "method"),
        ("value", "q", axis), ("train", "q", "training examples"), ("test", "q", "test examples"),
    )  # fmt: skip
    percentiles = tip(
        ("method", "n", "method"), ("p10", "q", "worst tenth up to"), ("p25", "q", "lower quarter"),
        ("p50", "q", "median"), ("p75", "q", "upper quarter"), ("p90", "q", "best tenth from"),
        ("clients", "q", "clients, all seeds"),
    )  # fmt: skip
    y = _by_method(ranked)
    of_boxes = {"data": {"name": "boxes"}, "transform": [_SHOWN]}
    colour = _colour(labels)
    whisker = {
        **of_boxes,
        "mark": {"type": "rule", "strokeWidth": 1.5},
        "encoding": {
            "y": y, "x": _measure(axis, field="p10"), "x2": {"field": "p90"},
            "color": colour, "opacity": _OPACITY,
        },
    }  # fmt: skip
    box = {
        **of_boxes,
        "mark": {"type": "bar", "size": 26, "fillOpacity": 0.13, "strokeWidth": 1.2},
        "encoding": {
            "y": y, "x": _measure(axis, field="p25"), "x2": {"field": "p75"},
            "color": colour, "stroke": colour, "opacity": _OPACITY, "tooltip": percentiles,
        },
    }  # fmt: skip
    median = {
        **of_boxes,
        "mark": {"type": "tick", "thickness": 3, "size": 26},
        "encoding": {
            "y": y,
            "x": _measure(axis, field="p50"),
            "color": colour,
            "opacity": _OPACITY,
        },
    }
    dots = {
        "transform": [_SHOWN],
        "mark": {"type": "circle", "cursor": "pointer", "size": 28},
        "encoding": {
            "y": y,
            "yOffset": {
                "field": "jitter",
                "type": "quantitative",
                "scale": {"domain": [-1.4, 1.4]},
            },
            "x": _measure(axis),
            "color": colour,
            "opacity": _FAINT,
            "tooltip": tooltip,
        },
    }
    picked = {
        "transform": [_SHOWN, {"filter": "picked != null && datum.key == picked"}],
        "mark": {"type": "point", "filled": False, "size": 130, "strokeWidth": 2.5},
        "encoding": {"y": y, "x": _measure(axis), "tooltip": tooltip},
    }
    layers = {"layer": [whisker, box, median, dots, picked]}
    return chart("results", f"{axis} of every client", {"step": 40}, layers)


def pareto(labels: Sequence[str], metric: Metric, cost: str, ticks: Sequence[float]) -> Json:
    """Results beside a cost; a line joins the shown methods that no other shown one beats in both.
    Without ``ticks`` the cost's axis is linear, and begins at 0."""
    axis = f"mean test {metric}{unit_of(metric)}"
    name, unit = COSTS[cost]
    number = "format(datum.value, '.4~s')"
    axis_of_cost: Json = {
        "title": name,
        "labelSeparation": 8,
        "labelExpr": f"replace({number}, regexp('([a-zA-Z]?)$'), ' $1{unit}')",
    }
    scale: Json = {"zero": True}
    if ticks:
        axis_of_cost |= {"values": list(ticks), "title": f"{name}, log scale"}
        scale |= {"type": "symlog", "constant": min([t for t in ticks if t > 0], default=1.0)}
    x = {"field": cost, "type": "quantitative", "scale": scale, "axis": axis_of_cost}
    tooltip = tip(
        ("method", "n", "method"), ("value", "q", axis),
        (cost, "s", f"{name}, {unit}"), ("isOnFront", "n", "on the dashed line"),
    )  # fmt: skip
    front = {
        "transform": [{"filter": "datum.isOnFront"}],
        "mark": {"type": "line", "interpolate": "step-after", "strokeDash": [3, 3]},
        "encoding": {"x": x, "y": _measure(axis), "order": {"field": cost, "type": "quantitative"}},
    }
    points = {
        "mark": {"type": "point", "filled": True, "size": 120, "opacity": 1},
        "encoding": {
            "x": x, "y": _measure(axis), "shape": _shape(labels),
            "color": _colour(labels, _OF_MARKS),
            "opacity": _OPACITY, "tooltip": tooltip,
        },
    }  # fmt: skip
    names = [
        {
            "transform": [{"filter": f"datum.{cost}Named == '{side}'"}],
            "mark": {"type": "text", "align": align, "dx": dx, "dy": -8, "fontSize": 11},
            "encoding": {"x": x, "y": _measure(axis), "text": {"field": "method"}},
        }
        for side, align, dx in (("right", "left", 8), ("left", "right", -8))
    ]
    layers = {"transform": _on_front(metric, cost), "layer": [front, points, *names]}
    return chart("costs", f"{axis} against {name}", 280, layers)


def _on_front(metric: Metric, cost: str) -> list[Json]:
    """Find the front of the shown methods: those that reach the best result so far, from the
    cheapest method on, at the lowest cost."""
    best, order = ("max", "descending") if higher_is_better(metric) else ("min", "ascending")
    return [
        _SHOWN,
        {
            "window": [{"op": best, "field": "value", "as": "best"}],
            "sort": [{"field": cost}, {"field": "value", "order": order}],
        },
        {"joinaggregate": [{"op": "min", "field": cost, "as": "least"}], "groupby": ["best"]},
        {"calculate": f"datum.value == datum.best && datum.{cost} == datum.least",
         "as": "isOnFront"},
    ]  # fmt: skip


def client_labels() -> Json:
    """One client's examples by class."""
    mark = {"type": "bar", "cornerRadiusEnd": 2}
    encoding: Json = {
        "x": {"field": "count", "type": "quantitative",
              "axis": {"title": "examples", "tickMinStep": 1}},
        "y": {"field": "class", "type": "ordinal", "sort": None,
              "axis": {"title": None, "labelLimit": 110, "grid": False}},
        "tooltip": tip(("class", "n", "class"), ("count", "q", "examples")),
    }  # fmt: skip
    return chart("clientLabels", "the client's examples by class", {"step": 16},
                  {"mark": mark, "encoding": encoding})  # fmt: skip


def sizes() -> Json:
    """The training examples of every client, the largest first."""
    x = {"field": "name", "type": "nominal", "sort": None,
         "axis": {"title": "clients", "labelLimit": 90, "labelOverlap": True}}  # fmt: skip
    y = {"field": "train", "type": "quantitative", "axis": {"title": "training examples"}}
    words = tip(("name", "n", "client"), ("train", "q", "training examples"))
    encoding = {"x": x, "y": y, "tooltip": words}
    layers = {"mark": {"type": "bar", "cursor": "pointer"}, "encoding": encoding}
    return chart("sizes", "training examples by client", 220, layers)


def client_curves(labels: Sequence[str], metric: Metric) -> Json:
    """One client's test results by round, a line a method."""
    axis = f"test {metric}{unit_of(metric)}"
    return _lines("clientCurves", labels, axis, f"the client's {axis} by round", 220)


def losses(labels: Sequence[str]) -> Json:
    """Training losses by round, a line a method."""
    axis = "mean training loss"
    return _lines("losses", labels, axis, f"{axis} by round, a line a method", 280)


def best_so_far(labels: Sequence[str], bold: str, title: str) -> Json:
    """Steps by round, a line a method and seed, with a mark where the best value is reached; those
    of the method ``bold`` are thick."""
    x = {"field": "round", "type": "quantitative", "axis": _ROUNDS}
    places = {"x": x, "y": _measure(title)}
    words = tip(("method", "n", "method"), ("seed", "n", "seed"), ("round", "q", "round"),
                ("value", "q", title))  # fmt: skip
    own = {"color": _colour(labels, _OF_LINES), "opacity": _OPACITY}
    line = {
        "mark": {"type": "line", "interpolate": "step-after"},
        "encoding": {
            **places,
            **own,
            "strokeDash": _dash(labels, _OF_LINES),
            "detail": {"field": "seed"},
            "strokeWidth": {
                "condition": {"test": f"datum.method == {json.dumps(bold)}", "value": 3.5},
                "value": 1.2,
            },
        },
    }
    best = {
        "mark": {"type": "point", "size": 90, "strokeWidth": 2},
        "transform": [{"filter": "datum.isBest"}],
        "encoding": {**places, "color": _colour(labels, _OF_LINES), "opacity": _OPACITY,
                     "shape": _by(labels, SHAPES, None)},
    }  # fmt: skip
    touch = {"mark": {"type": "circle", "size": 160, "opacity": 0.001},
             "encoding": {**places, "tooltip": words}}  # fmt: skip
    layers = {"transform": [_SHOWN], "layer": [line, best, touch]}
    return chart("lines", f"{title} by round, a line a method", 280, layers)


def _lines(name: str, labels: Sequence[str], axis: str, description: str, height: int) -> Json:
    """A line a method, and nothing else."""
    x = {"field": "round", "type": "quantitative", "axis": _ROUNDS}
    tooltip = tip(("method", "n", "method"), ("round", "q", "round"), ("value", "q", axis))
    own = {"color": _colour(labels, _OF_LINES), "opacity": _OPACITY}
    common = {"x": x, "y": _measure(axis), **own}
    line = {"mark": {"type": "line", "strokeWidth": 2, "strokeCap": "butt"},
            "encoding": common | {"strokeDash": _dash(labels, _OF_LINES)}}  # fmt: skip
    touch = {"mark": {"type": "circle", "size": 160, "opacity": 0.001},
             "encoding": {"x": x, "y": _measure(axis), "tooltip": tooltip}}  # fmt: skip
    layers = {"transform": [_SHOWN], "layer": [line, touch]}
    return chart(name, description, height, layers)
