"""The look of figures, and their form as SVG, of which one page can have several."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours (without yellow), which differ with every common colour blindness.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
LINES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")

RC: dict[str, Any] = {
    "figure.facecolor": "white",
    "font.size": 10,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#555555",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "hatch.color": "#b5b5b5",
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "image.cmap": "cividis",
    "svg.fonttype": "none",
}


@dataclass(frozen=True)
class Drawing:
    """A figure, its heading, and a caption that describes it.

    ``hover`` has the words that a browser shows over the markers of a scatter plot: by the plot's
    ``gid``, one text a marker, in their order.
    """

    title: str
    figure: Figure
    caption: str
    hover: Mapping[str, Sequence[str]] = field(default_factory=dict)


def style(index: int) -> dict[str, str]:
    """Return colour and dashes of the method at ``index``; they differ for 28 methods.

    >>> style(7)
    {'color': '#0072b2', 'linestyle': '--'}
    """
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": LINES[index // len(COLOURS) % len(LINES)],
    }


def marker(index: int) -> str:
    """Return the marker of the method at ``index``."""
    return MARKERS[index % len(MARKERS)]


def new_figure(height: float) -> Figure:
    """Return an empty figure, 9 inches wide and ``height`` inches high."""
    from matplotlib.figure import Figure

    return Figure(figsize=(9, height), layout="constrained")


def shared_legend(figure: Figure, handles: list[Any], labels: list[str]) -> None:
    """Draw one legend under all axes, in as many columns as fit."""
    longest = max(map(len, labels), default=1)
    columns = max(1, min(len(labels), 100 // (longest + 8)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def _with_titles(text: str, gid: str, words: Sequence[str]) -> str:
    """Give the markers of a plot the titles that a browser shows over them."""
    start = text.index(f'<g id="{gid}">')
    titles = iter(words)
    marked = re.sub(
        r"<use ([^>]*)/>",
        lambda m: f"<use {m[1]}><title>{escape(next(titles))}</title></use>",
        text[start:],
        count=len(words),
    )
    return text[:start] + marked


def svg(drawing: Drawing, name: str) -> str:
    """Return ``drawing`` as an SVG element whose ids all begin with ``name``; deterministic."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        buffer = io.StringIO()
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        drawing.figure.savefig(buffer, format="svg", metadata=no_metadata)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    for gid, words in drawing.hover.items():
        text = _with_titles(text, gid, words)
    linked = set(re.findall(r'(?:href="#|url\(#)([^")]+)', text))
    text = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in linked else "", text)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", text)
    label = escape(f"{drawing.title}. {drawing.caption}", quote=True)
    return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
