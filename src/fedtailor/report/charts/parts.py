"""What the live charts of single methods share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .content import Json, number
from .specs import by_round, chart, layer, tip, touch

Rows = Iterable[Mapping[str, Any]]


@dataclass(frozen=True)
class Chart:
    """A specification, and its rows by data set."""

    spec: Json
    rows: Mapping[str, Rows]


@dataclass(frozen=True)
class Figure:
    """Charts of one method. With ``rounds`` a slider chooses one of them, and rows of the data set
    ``chosen`` are those of that round."""

    title: str
    caption: str
    charts: Sequence[Chart]
    rounds: Sequence[int] = ()
    is_stacked: bool = False  # one chart above the other, instead of side by side


def line_chart(
    title: str, series: str, colour: Json, tooltip: Sequence[tuple[str, str, str]] = ()
) -> Json:
    """Lines by round: rows have ``round``, ``series`` and ``value``, and ``low`` and ``high`` of a
    band where they are known; the values are percentages."""
    y = {"field": "value", "type": "quantitative", "axis": {"title": title},
         "scale": {"domain": [0, 100]}}  # fmt: skip
    words = [("series", "n", series), ("round", "q", "round"), ("value", "q", title), *tooltip]
    places = {"x": by_round(), "y": y}
    of_series: Json = {**places, "color": colour, "detail": {"field": "series"}}
    ends = {"y": y | {"field": "low"}, "y2": {"field": "high"}}
    layers = [
        layer({"type": "line", "strokeWidth": 2}, of_series),
        layer({"type": "circle", "size": 36, "opacity": 1}, of_series),
        layer({"type": "area", "opacity": 0.15}, of_series | ends,
              {"filter": "isValid(datum.low)"}),
        touch(places, tip(*words)),
    ]  # fmt: skip
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
