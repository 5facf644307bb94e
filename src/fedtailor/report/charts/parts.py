"""What the live charts of single methods share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .content import Json, number
from .specs import chart, tip

Rows = Iterable[Mapping[str, Any]]


@dataclass(frozen=True)
class Chart:
    """A specification, and its rows by data set."""

    spec: Json
    rows: Mapping[str, Rows]


@dataclass(frozen=True)
class Figure:
    """Charts of one method. With ``rounds`` a slider chooses one of them, and rows of the data set
    ``chosen`` are those of that round. ``beside_picture``: they stand below the method's picture,
    if there is one."""

    title: str
    caption: str
    charts: Sequence[Chart]
    rounds: Sequence[int] = ()
    is_stacked: bool = False  # one chart above the other, instead of side by side
    beside_picture: bool = False


def line_chart(
    title: str, series: str, colour: Json, tooltip: Sequence[tuple[str, str, str]] = (),
    *, least: float | None = 0,
) -> Json:  # fmt: skip
    """Lines by round: rows have ``round``, ``series`` and ``value``, and ``low`` and ``high`` of a
    band where they are known.

    The axis reaches from ``least`` to 100, or as far as the values if that is None.
    """
    x = {"field": "round", "type": "quantitative",
         "axis": {"title": "round", "tickMinStep": 1, "format": "d", "grid": False}}  # fmt: skip
    y = {"field": "value", "type": "quantitative", "axis": {"title": title},
         "scale": {"zero": False} if least is None else {"domain": [least, 100]}}  # fmt: skip
    words = [("series", "n", series), ("round", "q", "round"), ("value", "q", title), *tooltip]
    of_series: Json = {"x": x, "y": y, "color": colour, "detail": {"field": "series"}}
    area = of_series | {"y": y | {"field": "low"}, "y2": {"field": "high"}}
    layers = [
        {"mark": {"type": "line", "strokeWidth": 2}, "encoding": of_series},
        {"mark": {"type": "circle", "size": 36, "opacity": 1}, "encoding": of_series},
        {
            "transform": [{"filter": "isValid(datum.low)"}],
            "mark": {"type": "area", "opacity": 0.15},
            "encoding": area,
        },
        {
            "mark": {"type": "circle", "size": 160, "opacity": 0.001},
            "encoding": {"x": x, "y": y, "tooltip": tip(*words)},
        },
    ]
    return chart("lines", f"{title} by round", 260, {"layer": layers})


def nominal(title: str | None) -> Json:
    """Colours by series, with a legend of that title."""
    legend = {"orient": "top", "title": title, "symbolType": "circle", "symbolOpacity": 1}
    legend |= {"labelLimit": 260} | ({} if title else {"columns": 1})
    return {"field": "series", "type": "nominal", "sort": None, "legend": legend}


def spread(series: str, when: int, x: NDArray[np.float64]) -> Json:
    """The mean and the 10th and 90th percentile of ``x``."""
    low, high = np.percentile(x, (10, 90)).tolist()
    values = {"value": number(float(x.mean())), "low": number(low), "high": number(high)}
    return {"series": series, "round": when, **values}
