"""Maps of coloured cells, and dots, as Vega-Lite specifications; the page's script gives their
cells."""

from __future__ import annotations

from collections.abc import Sequence

from .content import Json
from .specs import chart, layer, picked, tip

_MAX_NAMES = 30  # below dots; with more clients, their numbers in order
_FEW = 14  # names that have room beside each other on a phone


def confusion(names: Sequence[str]) -> Json:
    """One method's confusion matrix; ``names`` are those of the classes."""
    tooltip = tip(
        ("true", "n", "true class"), ("predicted", "n", "predicted"), ("count", "q", "examples"),
        ("share", "q", "% of the true class"),
    )  # fmt: skip
    scale = {"type": "sqrt", "domain": [0, 100]}
    colour = {"field": "share", "title": "% of the true class", "scale": scale}
    x, y = ("predicted", "predicted class"), ("true", "true class")
    return _map("confusion", x, y, tooltip, colour, 20, names)


def labels_of_clients(names: Sequence[str]) -> Json:
    """Examples by client and class, of clients with these ``names``; the script gives the cells."""
    tooltip = tip(
        ("name", "n", "client"), ("class", "n", "class"), ("count", "q", "examples"),
        ("share", "q", "% of the client's"),
    )  # fmt: skip
    return _without("count", _map(
        "labels", ("name", "client"), ("class", "class"), tooltip,
        {"field": "count", "title": "examples (square-root scale)", "scale": {"type": "sqrt"}},
        18, names,
    ), "transparent")  # fmt: skip


def picture(content: Json) -> Json:
    """A method's map of clients by columns at one round; the script gives the cells."""
    if not content["column"]:
        return _dots(content)
    value = content["valueName"]
    tooltip = tip(
        ("name", "n", "client"), ("column", "n", content["column"]), ("value", "q", value),
        ("round", "q", "after round"),
    )  # fmt: skip
    scale: Json = {"domain": content["domain"], "clamp": True}
    if content["neutral"] is not None:
        scale |= {"domainMid": content["neutral"], "range": "diverging", "interpolate": "rgb"}
    colour = {"field": "value", "title": value, "scale": scale}
    step = max(5, min(14, 560 // len(content["clients"])))
    of_map = _map("cells", ("column", content["column"]), ("name", "client"), tooltip, colour, step)
    return _without("value", of_map, "#8886") if content["drops"] else of_map


def _dots(content: Json) -> Json:
    """One number for each client at one round, in the order of the last round."""
    value = content["valueName"]
    fields = [("name", "n", "client"), ("value", "q", value), ("round", "q", "after round")]
    axis: Json = {"title": value, "grid": True}
    if content["isWhole"]:
        axis |= {"tickMinStep": 1, "format": "d"}
    ends = [0.5, len(content["clients"]) + 0.5]
    x: Json = {"field": "place", "type": "quantitative", "scale": {"domain": ends, "nice": False}}
    title = "clients, the largest value first"
    x["axis"] = {"title": title, "grid": False, "tickMinStep": 1, "format": "d"}
    if len(content["clients"]) <= _MAX_NAMES:
        x = {"field": "name", "type": "nominal", "sort": {"field": "place"}}
        x["axis"] = {"title": title, "labelLimit": 90}
    y = {"field": "value", "type": "quantitative", "axis": axis,
         "scale": {"domain": content["reach"], "nice": True}}  # fmt: skip
    places: Json = {"x": x, "y": y}
    colour: Json = {"datum": "", "type": "nominal", "legend": None}
    if content["hasTruth"]:
        fields.append(("truth", "n", "true cluster"))
        legend = {"orient": "top", "title": "true cluster"}
        colour = {"field": "truth", "type": "nominal", "legend": legend}
    dots = layer({"type": "circle", "cursor": "pointer", "size": 90, "opacity": 0.9},
                 {**places, "color": colour, "tooltip": tip(*fields)})  # fmt: skip
    ring = picked("point", places, filled=False, size=240, strokeWidth=2.5)
    return chart("cells", f"{value} by client", 280, {"layer": [dots, ring]})


def _without(field: str, of_map: Json, colour: str) -> Json:
    """Give the cells of value 0 a colour of their own."""
    encoding = of_map["layer"][0]["encoding"]
    condition = {"test": f"datum.{field} == 0", "value": colour}
    encoding["color"] = {"condition": condition, **encoding["color"]}
    return of_map


def _map(
    name: str,
    x: tuple[str, str],
    y: tuple[str, str],
    tooltip: list[Json],
    colour: Json,
    step: int,
    names: Sequence[str] = (),
) -> Json:
    """A map of coloured cells; ``x`` and ``y`` are a field and its title, and ``names`` are those
    along x. If they are few, none is left out."""
    longest = max(map(len, names), default=0)

    def axis(field: str, title: str, angle: int) -> Json:
        may_skip = not angle or len(names) > _FEW
        shown: Json = {"title": title, "labelOverlap": may_skip, "labelSeparation": 1}
        shown |= {"labelLimit": 110, "grid": False}
        shown |= {"labelAngle": angle, "domain": False, "ticks": False}
        return {"field": field, "type": "ordinal", "sort": None, "axis": shown}

    places = {"x": axis(*x, -60 if longest > 3 else 0), "y": axis(*y, 0)}
    legend = {"orient": "top", "gradientLength": 160, "titleLimit": 300, "format": ".3~g"}
    colours = {"type": "quantitative", "legend": legend, **colour}
    rect = layer({"type": "rect", "cursor": "pointer"},
                 {**places, "color": colours, "tooltip": tooltip})  # fmt: skip
    layers = [rect, picked("rect", places, fill=None, strokeWidth=1.5)]
    return chart(name, f"{y[1]} by {x[1]}", {"step": step}, {"layer": layers})
