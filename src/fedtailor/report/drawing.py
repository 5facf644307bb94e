"""The look of figures, and their form as SVG, of which one page can have several."""

from __future__ import annotations

import io
import re
import warnings
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Twelve colours on white, and the same hues on black; neighbours differ in lightness, too.
COLOURS = (
    "#0067a5", "#d95300", "#00855a", "#c2185b", "#8e6c00", "#6a4cc3",
    "#008a99", "#7a4a2b", "#d6479b", "#5c8a00", "#5a6b7c", "#111418",
)  # fmt: skip
DARK = (
    "#5ab2f2", "#ff8c4a", "#3ecf98", "#ff6b96", "#e3c14b", "#a995ff",
    "#4fd3e4", "#c9956f", "#ffa0d6", "#b0db57", "#9db2c8", "#f2f4f7",
)  # fmt: skip
LINES: tuple[Any, ...] = ("-", (0, (6, 2)), (0, (2, 2)), (0, (8, 2, 2, 2)))
DASHES = ([1, 0], [8, 4], [3, 3], [10, 3, 3, 3])  # the same for the page's charts
MARKERS = ("o", "s", "^", "D", "v", "P")
SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross")
INK, GRID, PAPER = "#1c2228", "#dde1e5", "#fefefe"  # in the page they are those of its theme

RC: dict[str, Any] = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "font.size": 10,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "hatch.color": "#b5b5b5",
    "hatch.linewidth": 0.6,
    "legend.frameon": False,
    "image.cmap": "cividis",
    "svg.fonttype": "none",
    "text.parse_math": False,  # names are drawn as they are: with $ in them, too
}


@dataclass(frozen=True)
class Drawing:
    """A figure, its heading, and a caption that describes it."""

    title: str
    figure: Figure
    caption: str


def style(index: int) -> dict[str, Any]:
    """Return colour and dashes of the method at ``index``; they differ for 48 methods, and the
    colours of the first 12 do not repeat.

    >>> style(0)
    {'color': '#0067a5', 'linestyle': '-'}
    >>> style(12) == style(0)
    False
    """
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": LINES[(index + index // len(COLOURS)) % len(LINES)],
    }


def marker(index: int) -> str:
    """Return the marker of the method at ``index``."""
    return MARKERS[index % len(MARKERS)]


def hollow(index: int, colour: Any, size: float = 5.5) -> dict[str, Any]:
    """Return how a mark on the line of a method is drawn: in the line's ``colour``, ``size`` points
    wide, and hollow."""
    shape = {"marker": marker(index), "markersize": size, "linestyle": "none"}
    edge = {"markeredgecolor": colour, "markeredgewidth": 1.4}
    return {**shape, **edge, "markerfacecolor": PAPER}


def centred(neutral: float, values: NDArray[np.float64], reach: float) -> tuple[float, float]:
    """Return a range of colours with ``neutral`` in the middle that holds ``values``, and reaches
    at least ``reach`` to both sides, so that small differences stay pale.

    >>> centred(0.5, np.array([0.25, 0.51]), 0.125), centred(0.5, np.array([0.49]), 0.125)
    ((0.25, 0.75), (0.375, 0.625))
    """
    known = values[~np.isnan(values)]
    most = max(reach, float(np.abs(known - neutral).max(initial=0)))
    return neutral - most, neutral + most


def new_figure(height: float) -> Figure:
    """Return an empty figure, 9 inches wide and ``height`` inches high."""
    from matplotlib.figure import Figure

    return Figure(figsize=(9, height), layout="constrained")


def short(name: str, most: int = 40) -> str:
    """Return a name that leaves room for the figure.

    >>> short("fedavg"), short("ward", 3)
    ('fedavg', 'wa…')
    """
    return name if len(name) <= most else name[: most - 1] + "…"


def shared_legend(figure: Figure, handles: list[Any], labels: list[str]) -> None:
    """Draw one legend under all axes, in as many columns as fit."""
    longest = max(map(len, labels), default=1)
    columns = max(1, min(len(labels), 100 // (longest + 8)))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)


def svg(drawing: Drawing, name: str) -> str:
    """Return ``drawing`` as an SVG element whose ids all begin with ``name``; deterministic.

    Its colours are those of the page's theme.
    """
    import matplotlib

    with (
        matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the browser's fonts have it
        buffer = io.StringIO()
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        drawing.figure.savefig(buffer, format="svg", metadata=no_metadata)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"\n\s+", "\n", re.sub(r"(\.\d\d\d)\d+", r"\1", text))  # half its size
    linked = set(re.findall(r'(?:href="#|url\(#)([^")]+)', text))
    text = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in linked else "", text)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", text)
    for number, colour in enumerate(COLOURS):
        text = text.replace(colour, f"var(--m{number})")
    text = (
        text.replace(INK, "var(--ink)").replace(GRID, "var(--line)").replace(PAPER, "var(--card)")
    )
    label = escape(f"{drawing.title}. {drawing.caption}", quote=True)
    return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
