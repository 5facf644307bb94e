"""The charts as Vega-Lite specifications.

Data go by name and are filled in by the page's script, and so are the colours, which follow the
reader's theme. Each chart has the parameters ``shown`` (labels of methods), ``focus`` (a label, or
null), ``outer`` (pixels, of its place) and, where it has clients, ``picked`` (a client's key, or
null).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...store.metrics import Metric, higher_is_better, is_percentage, unit_of
from ..costs import COSTS
from ..drawing import COLOURS, DASHES, SHAPES, WIDTH
from .content import Json

_SHOWN = {"filter": "indexof(shown, datum.method) >= 0"}
_FOCUSED = "focus == null || focus == datum.method"
_OPACITY = {"condition": {"test": _FOCUSED, "value": 1}, "value": 0.12}
_FAINT = {"condition": {"test": _FOCUSED, "value": 0.6}, "value": 0.06}
_OF_LINES = {"symbolType": "stroke", "symbolSize": 450, "symbolStrokeWidth": 2}
_OF_MARKS = {"symbolSize": 90, "symbolStrokeWidth": 0}


def chart(name: str, description: str, height: int | Json, layers: Json) -> Json:
    """Return a chart of the data ``name``, as wide as its place in the page."""
    params: Json = {"shown": [], "focus": None, "picked": None, "outer": WIDTH}
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "description": description,
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "data": {"name": name},
        "params": [{"name": param, "value": value} for param, value in params.items()],
        **layers,
    }


def layer(mark: Json, encoding: Json, *transform: Json, data: str = "") -> Json:
    """Return one layer of a chart, of the rows that ``transform`` leaves."""
    found: Json = {"mark": mark, "encoding": encoding}
    found |= {"transform": list(transform)} if transform else {}
    return found | ({"data": {"name": data}} if data else {})


def touch(places: Json, words: Sequence[Json]) -> Json:
    """Return a layer without colour that says what is under the pointer."""
    mark = {"type": "circle", "size": 160, "opacity": 0.001}
    return layer(mark, {**places, "tooltip": words})


def picked(mark: str, encoding: Json, *transform: Json, **look: Any) -> Json:
    """Return a layer that marks the picked client."""
    is_picked = {"filter": "picked != null && datum.key == picked"}
    return layer({"type": mark, **look}, encoding, *transform, is_picked)


def by_round() -> Json:
    """The axis of rounds."""
    axis = {"title": "round", "tickMinStep": 1, "format": "d", "grid": False}
    return {"field": "round", "type": "quantitative", "axis": axis}


def _legend(labels: Sequence[str], look: Json) -> Json:
    """Which method is which, as a saved chart must say, in as many columns as fit."""
    limit = min(max(110, 8 * max(map(len, labels), default=0)), 300)
    columns = {"signal": f"max(1, floor((outer - 80) / {limit + 5}))"}
    names = {"values": {"expr": "shown"}, "labelLimit": limit, "columns": columns}
    return {"orient": "bottom", "title": None, "symbolOpacity": 1, **names, **look}


def _by(
    labels: Sequence[str], legend: Json | None = None, look: Sequence[Any] | None = None
) -> Json:
    scale: Json = {"domain": list(labels)}
    if look is not None:
        turns = (k + k // len(COLOURS) for k in range(len(labels)))  # colours repeat, looks do not
        scale["range"] = [look[turn % len(look)] for turn in turns]
    legend = legend and _legend(labels, legend)
    return {"field": "method", "type": "nominal", "scale": scale, "legend": legend}


def _measure(title: str, field: str = "value") -> Json:
    axis = {"title": title, "grid": True}
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
    words = tip(
        ("method", "n", "method"), ("round", "q", "round"), ("value", "q", axis),
        ("std", "q", "std over seeds"), ("reported", "q", "seeds that report this round"),
    )  # fmt: skip
    colour = {"color": _by(labels, _OF_MARKS)}
    places = {"x": by_round(), "y": _measure(axis)}
    own = {**places, **colour, "opacity": _OPACITY}
    low_high = {"x": by_round(), "y": _measure(axis, "low"), "y2": {"field": "high"}, **colour}
    has_band = {"filter": f"datum.std > 0 && ({_FOCUSED})"}
    layers = [
        layer({"type": "area", "opacity": 0.12, "interpolate": "linear"}, low_high, has_band),
        layer({"type": "line", "strokeWidth": 2, "strokeCap": "butt"},
              own | {"strokeDash": _by(labels, _OF_MARKS, DASHES)}),
        layer({"type": "point", "size": 70, "strokeWidth": 2},
              own | {"shape": _by(labels, _OF_MARKS, SHAPES)}, {"filter": "datum.reported > 0"}),
        touch(places, words),
    ]  # fmt: skip
    transform = [
        {"filter": f"datum.split == '{split}'"},
        _SHOWN,
        {"calculate": "datum.value - datum.std", "as": "low"},
        {"calculate": "datum.value + datum.std", "as": "high"},
    ]
    description = f"{axis} by round, a line a method"
    return chart("curves", description, 280, {"transform": transform, "layer": layers})


def _by_method(ranked: Sequence[str]) -> Json:
    axis = {"title": None, "labelLimit": 180, "labelPadding": 8}
    axis |= {"grid": False, "ticks": False, "domain": False}
    return {"field": "method", "type": "nominal", "sort": list(ranked), "axis": axis}


def ahead(labels: Sequence[str], ranked: Sequence[str], metric: Metric) -> Json:
    """How far each method is ahead of training alone, with its interval."""
    unit = "points" if is_percentage(metric) else unit_of(metric).strip(" ()")
    axis = f"ahead of training alone ({unit or metric})"
    words = tip(
        ("method", "n", "method"), ("value", "q", "ahead by"), ("low", "q", "95 % from"),
        ("high", "q", "to"), ("reading", "n", "these data show"),
        ("worseOff", "q", "clients worse off"), ("clients", "q", "of"),
    )  # fmt: skip
    own = {"y": _by_method(ranked), "color": _by(labels), "opacity": _OPACITY, "tooltip": words}
    ends = {"x": _measure(axis, "low"), "x2": {"field": "high"}}
    zero = {"datum": 0, "type": "quantitative", "axis": {"title": axis}}
    layers = [
        {**layer({"type": "rule", "strokeDash": [4, 3]}, {"x": zero}), "data": {"values": [{}]}},
        layer({"type": "rule", "strokeWidth": 3}, own | ends, _SHOWN,
              {"filter": "isValid(datum.low)"}),
        layer({"type": "point", "filled": True, "size": 110, "opacity": 1},
              own | {"x": _measure(axis)}, _SHOWN),
    ]  # fmt: skip
    return chart("ahead", axis, {"step": 26}, {"layer": layers})


def clients(labels: Sequence[str], ranked: Sequence[str], metric: Metric) -> Json:
    """The test result of every client with every method, over boxes of all clients."""
    axis = f"test {metric}{unit_of(metric)}"
    words = tip(
        ("name", "n", "client"), ("group", "n", "of"), ("method", "n", "method"),
        ("value", "q", axis), ("train", "q", "training examples"), ("test", "q", "test examples"),
    )  # fmt: skip
    percentiles = tip(
        ("method", "n", "method"), ("p10", "q", "worst tenth up to"), ("p25", "q", "lower quarter"),
        ("p50", "q", "median"), ("p75", "q", "upper quarter"), ("p90", "q", "best tenth from"),
        ("clients", "q", "clients, all seeds"),
    )  # fmt: skip
    y, colour = _by_method(ranked), _by(labels)
    of_box = {"y": y, "color": colour, "opacity": _OPACITY}
    offset = {"field": "jitter", "type": "quantitative", "scale": {"domain": [-1.4, 1.4]}}
    dot = {"y": y, "yOffset": offset, "x": _measure(axis), "color": colour, "opacity": _FAINT}
    layers = [
        layer({"type": "rule", "strokeWidth": 1.5},
              of_box | {"x": _measure(axis, "p10"), "x2": {"field": "p90"}}, _SHOWN, data="boxes"),
        layer({"type": "bar", "size": 26, "fillOpacity": 0.13, "strokeWidth": 1.2},
              of_box | {"x": _measure(axis, "p25"), "x2": {"field": "p75"}, "stroke": colour,
                        "tooltip": percentiles}, _SHOWN, data="boxes"),
        layer({"type": "tick", "thickness": 3, "size": 26},
              of_box | {"x": _measure(axis, "p50")}, _SHOWN, data="boxes"),
        layer({"type": "circle", "cursor": "pointer", "size": 28}, dot | {"tooltip": words},
              _SHOWN),
        picked("point", {"y": y, "x": _measure(axis), "tooltip": words}, _SHOWN,
               filled=False, size=130, strokeWidth=2.5),
    ]  # fmt: skip
    return chart("results", f"{axis} of every client", {"step": 40}, {"layer": layers})


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
    words = tip(
        ("method", "n", "method"), ("value", "q", axis),
        (cost, "s", f"{name}, {unit}"), ("isOnFront", "n", "on the dashed line"),
    )  # fmt: skip
    places = {"x": x, "y": _measure(axis)}
    points = {"shape": _by(labels, _OF_MARKS, SHAPES), "color": _by(labels, _OF_MARKS)}
    layers = [
        layer({"type": "line", "interpolate": "step-after", "strokeDash": [3, 3]},
              places | {"order": {"field": cost, "type": "quantitative"}},
              {"filter": "datum.isOnFront"}),
        layer({"type": "point", "filled": True, "size": 120, "opacity": 1},
              places | points | {"opacity": _OPACITY, "tooltip": words}),
        *(
            layer({"type": "text", "align": align, "dx": dx, "dy": -8, "fontSize": 11},
                  places | {"text": {"field": "method"}},
                  {"filter": f"datum.{cost}Named == '{side}'"})
            for side, align, dx in (("right", "left", 8), ("left", "right", -8))
        ),
    ]  # fmt: skip
    of_all = {"transform": _on_front(metric, cost), "layer": layers}
    return chart("costs", f"{axis} against {name}", 280, of_all)


def _on_front(metric: Metric, cost: str) -> list[Json]:
    """The front of the shown methods: the best result so far, from the cheapest on."""
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
    encoding: Json = {
        "x": {"field": "count", "type": "quantitative",
              "axis": {"title": "examples", "tickMinStep": 1}},
        "y": {"field": "class", "type": "ordinal", "sort": None,
              "axis": {"title": None, "labelLimit": 110, "grid": False}},
        "tooltip": tip(("class", "n", "class"), ("count", "q", "examples")),
    }  # fmt: skip
    bars = layer({"type": "bar", "cornerRadiusEnd": 2}, encoding)
    return chart("clientLabels", "the client's examples by class", {"step": 16}, bars)


def sizes() -> Json:
    """The training examples of every client, the largest first."""
    title = "training examples"
    encoding: Json = {
        "x": {"field": "name", "type": "nominal", "sort": None,
              "axis": {"title": "clients", "labelLimit": 90, "labelOverlap": True}},
        "y": {"field": "train", "type": "quantitative", "axis": {"title": title}},
        "tooltip": tip(("name", "n", "client"), ("train", "q", title)),
    }  # fmt: skip
    bars = layer({"type": "bar", "cursor": "pointer"}, encoding)
    return chart("sizes", f"{title} by client", 220, bars)


def client_curves(labels: Sequence[str], metric: Metric) -> Json:
    """One client's test results by round, a line a method."""
    axis = f"test {metric}{unit_of(metric)}"
    return _lines("clientCurves", labels, axis, f"the client's {axis} by round", 220)


def losses(labels: Sequence[str]) -> Json:
    """Training losses by round, a line a method."""
    axis = "mean training loss"
    return _lines("losses", labels, axis, f"{axis} by round, a line a method", 280)


def _lines(name: str, labels: Sequence[str], axis: str, description: str, height: int) -> Json:
    words = tip(("method", "n", "method"), ("round", "q", "round"), ("value", "q", axis))
    places = {"x": by_round(), "y": _measure(axis)}
    own = {"color": _by(labels, _OF_LINES), "strokeDash": _by(labels, _OF_LINES, DASHES)}
    line = layer({"type": "line", "strokeWidth": 2, "strokeCap": "butt"},
                 {**places, **own, "opacity": _OPACITY})  # fmt: skip
    layers = {"transform": [_SHOWN], "layer": [line, touch(places, words)]}
    return chart(name, description, height, layers)
