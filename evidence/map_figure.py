"""The figure of docs/when.md: how far each method is ahead of training alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evidence.cross_cells import SEEDS
from evidence.map_cells import ALONE
from fedtailor.report.drawing import COLOURS

_DODGE = 0.012  # how far two methods' points stand apart, as a share of the axis

Style = Mapping[str, str]


def draw(found: Sequence[Mapping[str, Any]], path: Path, titles: Mapping[str, str]) -> None:
    """Draw each data set: against the clients' label overlap and against their examples; one with a
    single setting as a row for each method. Intervals are drawn, and points that rest on fewer
    seeds than planned are hollow."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import PercentFormatter

    names = sorted({name for cell in found for name in cell["methods"]} - {ALONE})
    styles = {
        name: {"color": COLOURS[number], "marker": "osD^v<>PX*h8"[number]}
        for number, name in enumerate(names)
    }
    by_data: dict[str, list[Mapping[str, Any]]] = {}
    for cell in found:
        by_data.setdefault(cell["data"], []).append(cell)
    heights = [height for of in by_data.values() for height in ([3.6, 3.6], [3.0])[len(of) == 1]]
    style = {"svg.hashsalt": "when", "font.size": 10, "axes.spines.top": False,
             "axes.spines.right": False}  # fmt: skip
    with plt.rc_context(style):
        figure, axes = plt.subplots(
            len(heights), 1, figsize=(7.2, sum(heights)), layout="constrained", squeeze=False,
            height_ratios=heights,
        )  # fmt: skip
        left = iter(axes[:, 0])
        for data, of in by_data.items():
            first = next(left)
            first.set_title(titles.get(data, data), loc="left")
            if len(of) == 1:
                _rows(first, of[0], styles)
                continue
            second, base = next(left), min(of, key=lambda cell: len(cell["settings"]))
            _lines(first, _alike(of, base, "overlap"), "label_overlap", styles)
            first.set_xlabel("label overlap of two clients")
            first.xaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
            first.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
            _lines(second, _alike(of, base, "size"), "median_examples", styles)
            second.set_xlabel("training examples a client")
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def _alike(
    of: Sequence[Mapping[str, Any]], base: Mapping[str, Any], varied: str
) -> list[Mapping[str, Any]]:
    """The settings that differ from ``base`` in their clients' overlap, or in their size, alone."""
    size = base["clients"]["median_examples"]
    near = [cell for cell in of if cell["clients"]["number"] == base["clients"]["number"]]
    if varied == "overlap":
        return [c for c in near if abs(c["clients"]["median_examples"] / size - 1) < 0.2]
    return [c for c in near if c["alpha"] == base["alpha"]]


def _lines(
    axis: Any, found: Sequence[Mapping[str, Any]], key: str, styles: Mapping[str, Style]
) -> None:
    """A line for each method over the settings, which stand at their place on the axis."""
    found = sorted(found, key=lambda cell: cell["clients"][key])
    names = [name for name in styles if any(name in cell["methods"] for cell in found)]
    places = [cell["clients"][key] for cell in found]
    is_log = key == "median_examples"
    if is_log:
        axis.set_xscale("log")
        axis.set_xticks(places, [f"{place:.0f}" for place in places])
        axis.minorticks_off()
    axis.axhline(0, color="0.6", linewidth=0.8)
    axis.set_ylabel("points over training alone")
    ratio, span = places[-1] / places[0], places[-1] - places[0]
    for number, name in enumerate(names):
        aside = (number - (len(names) - 1) / 2) * _DODGE
        at, leads = [], []
        for place, cell in zip(places, found, strict=True):
            if name in cell["methods"]:
                at.append(place * ratio**aside if is_log else place + span * aside)
                leads.append(100 * cell["methods"][name]["over_alone"][0])
                _point(axis, at[-1], cell["methods"][name], styles[name], upright=True)
        axis.plot(at, leads, linewidth=0.8, alpha=0.6, color=styles[name]["color"])
        axis.plot([], [], label=name, markersize=4, linewidth=0.8, **styles[name])


def _rows(axis: Any, cell: Mapping[str, Any], styles: Mapping[str, Style]) -> None:
    """A row for each method of one setting, the best at the top."""
    names = [name for name in cell["methods"] if name != ALONE]
    for place, name in enumerate(names):
        _point(axis, place, cell["methods"][name], styles[name], upright=False)
    axis.axvline(0, color="0.6", linewidth=0.8)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.set_xlabel("points over training alone")


def _point(
    axis: Any, place: float, method: Mapping[str, Any], style: Style, *, upright: bool
) -> None:
    """The lead of a method with its interval; hollow if it rests on few seeds."""
    lead, low, high = (100 * x for x in method["over_alone"])
    few = len(method["seeds"]) < len(SEEDS)
    look = {"markersize": 4.5, "linewidth": 0.7, "linestyle": "none", "elinewidth": 0.7, **style}
    face = "white" if few else style["color"]
    interval = [[lead - low], [high - lead]]
    if upright:
        axis.errorbar([place], [lead], yerr=interval, markerfacecolor=face, **look)
    else:
        axis.errorbar([lead], [place], xerr=interval, markerfacecolor=face, **look)
