"""The look of charts, and a Vega-Lite specification in that look as an SVG file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import InputError

# Twelve colours on white, and the same hues on black; neighbours differ in lightness, too.
COLOURS = (
    "#0067a5", "#d95300", "#00855a", "#c2185b", "#8e6c00", "#6a4cc3",
    "#008a99", "#7a4a2b", "#d6479b", "#5c8a00", "#5a6b7c", "#111418",
)  # fmt: skip
DARK = (
    "#5ab2f2", "#ff8c4a", "#3ecf98", "#ff6b96", "#e3c14b", "#a995ff",
    "#4fd3e4", "#c9956f", "#ffa0d6", "#b0db57", "#9db2c8", "#f2f4f7",
)  # fmt: skip
DASHES = ([1, 0], [8, 4], [3, 3], [10, 3, 3, 3])
SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross")
LOOK: Mapping[str, Any] = {  # "--ink": that colour of the reader's theme in page.css
    "background": "--card",  # a saved chart keeps the ground on which its ink can be read
    "font": "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif",
    "view": {"stroke": None},
    "axis": {
        "labelColor": "--ink", "titleColor": "--soft", "gridColor": "--line",
        "domainColor": "--soft", "tickColor": "--soft", "labelFontSize": 12, "titleFontSize": 12,
        "titleFontWeight": "normal", "labelFlush": False,
    },
    "axisXQuantitative": {"tickCount": {"signal": "ceil(width / 70)"}, "labelOverlap": True},
    "legend": {
        "labelColor": "--ink", "titleColor": "--soft", "titleFontWeight": "normal",
        "labelFontSize": 12, "symbolLimit": 0,
        "columns": {"signal": "max(1, floor((outer - 80) / 115))"},
    },
    "title": {"color": "--ink", "anchor": "start", "fontSize": 13},
    "text": {"color": "--ink"}, "rule": {"color": "--ink"}, "line": {"color": "--soft"},
    "point": {"stroke": "--ink"}, "rect": {"stroke": None}, "bar": {"color": "--m0"},
    "circle": {"color": "--ink"},
    "range": {
        "category": [f"--m{k}" for k in range(len(COLOURS))],
        "heatmap": "--heat", "ramp": "--heat", "diverging": "--diverging",
    },
}  # fmt: skip
WIDTH = 640  # pixels of a chart in a file


@cache
def _light() -> dict[str, Any]:
    """The colours of the light theme by name; several are a list."""
    css = (Path(__file__).parent / "page.css").read_text("utf-8").partition("}")[0]
    found: dict[str, Any] = {
        name: value.split(" ") if " " in value else value
        for name, value in re.findall(r"(--\w+): ([^;]+);", css)
    }
    return found | {f"--m{k}": colour for k, colour in enumerate(COLOURS)}


def _painted(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _painted(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_painted(one) for one in value]
    return _light().get(value, value) if isinstance(value, str) else value


def svg(spec: Mapping[str, Any]) -> str:
    """Draw a Vega-Lite specification, with its data, as SVG in the colours of the light theme."""
    vl = converter()
    look = _painted(LOOK)
    sized = {"width": WIDTH} if spec.get("width") == "container" else {}
    if not sized:  # these are of one chart's width
        del look["axisXQuantitative"]["tickCount"], look["legend"]["columns"]
    text: str = vl.vegalite_to_svg({**spec, **sized}, vl_version="6.4", config=look)
    return text


def converter() -> Any:
    """Return the module that draws files, or say how to install it."""
    try:
        import vl_convert
    except ImportError:
        words = "figures need vl-convert-python: pip install 'fedtailor[figures]'"
        raise InputError(words) from None
    return vl_convert
