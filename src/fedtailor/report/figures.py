"""The figures that every comparison has. Functions that draw import Matplotlib themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .costs import COSTS, costs_of, front, is_wide
from .differences import Difference, too_few
from .drawing import (
    COLOURS,
    INK,
    PAPER,
    Drawing,
    hollow,
    marker,
    new_figure,
    shared_legend,
    short,
    style,
)
from .metrics import box_of
from .read import Run
from .records import Counts, Partition
from .select import (
    Entry,
    Metric,
    SelectedRound,
    by_round,
    higher_is_better,
    is_percentage,
    select_by,
    select_round,
    sizes_of,
    summary,
    unit_of,
    values_of,
)
from .table import Table

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
_MAX_COLUMNS = 2000  # clients side by side
_MAX_DOTS = 150  # clients a method; with more of them only the box is drawn


def _scale(metric: Metric) -> float:
    return 100.0 if is_percentage(metric) else 1.0


def _axis(metric: Metric) -> str:
    return metric + unit_of(metric)


def _selected(entry: Entry) -> list[SelectedRound | None]:
    return [select_round(trial, "personal", select_by(entry.run)) for trial in entry.trials]


def _curves(entry: Entry, split: str, metric: Metric) -> list[dict[int, float]]:
    return [
        {
            number: _scale(metric) * summary(evaluation, metric).mean
            for number, evaluation in by_round(trial, "personal", split).items()
        }
        for trial in entry.trials
    ]


def convergence(entries: Sequence[Entry], metric: Metric) -> Drawing:
    """Draw validation and test results of the personal models by round."""
    figure = new_figure(4.0 + 0.07 * len(entries))
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    handles = []
    for index, entry in enumerate(entries):
        selected = _selected(entry)
        for axis, split in zip(axes, ("validation", "test"), strict=True):
            curves = _curves(entry, split, metric)
            rounds = sorted(set().union(*curves))
            values = [[curve[r] for curve in curves if r in curve] for r in rounds]
            mean = np.array([np.mean(seeds) for seeds in values])
            std = np.array([np.std(seeds, ddof=1) if len(seeds) > 1 else 0.0 for seeds in values])
            (line,) = axis.plot(rounds, mean, linewidth=1.6, **style(index))
            axis.fill_between(
                rounds, mean - std, mean + std, color=line.get_color(), alpha=0.15, lw=0
            )
            reported = sorted({one.round for one in selected if one} & set(rounds))
            axis.plot(
                reported,
                [mean[rounds.index(when)] for when in reported],
                **hollow(index, line.get_color()),
            )
        handles.append(line)
    for axis, split in zip(axes, ("validation", "test"), strict=True):
        axis.set(title=split, xlabel="round")
        axis.grid(visible=True)
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0].set_ylabel(f"mean {_axis(metric)}")
    shared_legend(figure, handles, [short(entry.label) for entry in entries])
    return Drawing(
        "Convergence",
        figure,
        f"The figure shows the mean {metric} of the personal models over clients, by round, on "
        "validation data (left) and test data (right). Lines are means over the seeds that reached "
        "the round; bands are one sample standard deviation wide on each side. Hollow markers show "
        "the rounds whose results the table reports; each seed has its own.",
    )


def _all_clients(entry: Entry, metric: Metric) -> Floats:
    """Return the sorted test results of all clients that have examples, with all seeds."""
    results = [
        _scale(metric) * value
        for selection in _selected(entry)
        if selection is not None
        for value, count in zip(
            values_of(selection.test, metric), sizes_of(selection.test, metric), strict=True
        )
        if count and value is not None and np.isfinite(value)
    ]
    return np.sort(np.array(results, dtype=np.float64))


def distribution(entries: Sequence[Entry], metric: Metric) -> Drawing:
    """Draw the test results of single clients at the selected round."""
    figure = new_figure(max(3.4, 1.6 + 0.48 * len(entries)))
    box, curve = figure.subplots(1, 2)
    lines = {}
    for index, entry in enumerate(entries):
        x = _all_clients(entry, metric)
        if not len(x):
            continue
        colour = style(index)["color"]
        line = {"color": colour, "linewidth": 1.4}
        names = ("whislo", "q1", "med", "q3", "whishi")
        box.bxp(
            [dict(zip(names, box_of(x.tolist()), strict=True))],
            positions=[index],
            orientation="horizontal",
            widths=0.55,
            showfliers=False,
            boxprops=line,
            whiskerprops=line,
            capprops=line,
            medianprops={"color": colour, "linewidth": 2.6},
        )
        if len(x) <= _MAX_DOTS:
            jitter = 0.2 * np.sin(2.4 * np.arange(len(x)))
            box.scatter(x, index + jitter, s=11, color=colour, alpha=0.35, linewidth=0)
        share = np.linspace(0, 100, min(len(x), 201)) if len(x) > 1 else np.array([50.0])
        (lines[entry.label],) = curve.plot(
            share, np.percentile(x, share), linewidth=1.6, **style(index)
        )
    box.set_yticks(range(len(entries)), [short(entry.label) for entry in entries])
    box.set_ylim(len(entries) - 0.5, -0.5)
    box.set_xlabel(f"test {_axis(metric)}")
    box.grid(visible=True, axis="x")
    curve.set(xlabel="share of clients (%), sorted", ylabel=f"test {_axis(metric)}", xlim=(0, 100))
    curve.grid(visible=True)
    shared_legend(figure, list(lines.values()), list(map(short, lines)))
    return Drawing(
        "Clients",
        figure,
        f"The figure shows the test {metric} of each client's personal model at the round that the "
        "table reports, with all seeds together. On the left, boxes show the median and the "
        "quartiles, whiskers reach from the worst to the best tenth, and each dot is a client "
        f"(for methods with up to {_MAX_DOTS} dots). On the right, the same results are sorted.",
    )


def ticks(low: float, high: float) -> list[float]:
    """Return round numbers from ``low`` to ``high``; with more decades, fewer in each of them."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 1.5, 2, 3, 5, 7) if len(powers) <= 2 else (1, 2, 5) if len(powers) <= 4 else (1,)
    return [s * 10.0**p for p in powers for s in steps if low <= s * 10.0**p <= high]


def cost(entries: Sequence[Entry], metric: Metric, costs: Sequence[str]) -> Drawing:
    """Draw test results against ``costs``, which all methods must have: an axis for each."""
    rows = math.ceil(len(costs) / 2)
    figure = new_figure(0.6 + 0.07 * len(entries) + (3.2 if len(costs) == 1 else 2.7 * rows))
    columns = min(2, len(costs))
    axes = figure.subplots(rows, columns, sharey=True, squeeze=False).ravel()
    marks: dict[str, Any] = {}
    for axis, name in zip(axes, costs, strict=False):
        marks |= _draw_cost(axis, entries, metric, name)
    for axis in axes[len(costs) :]:
        axis.set_axis_off()
    for axis in axes[::columns]:
        axis.set_ylabel(f"mean test {_axis(metric)}")
    shared_legend(figure, list(marks.values()), list(map(short, marks)))
    return Drawing(
        "Cost against result",
        figure,
        f"The figure shows the mean test {metric} of the personal models against what it costs. "
        "Bytes and operations are those of a client until the reported round, seconds those of the "
        "whole training unless the axis says otherwise. Each small mark is a seed; each large mark "
        "is the mean over the seeds of a method. The dashed line joins the methods for which no "
        "other one is both cheaper and better.",
    )


def _draw_cost(axis: Any, entries: Sequence[Entry], metric: Metric, name: str) -> dict[str, Any]:
    """Draw the marks, and return the large one of each method."""
    from matplotlib.ticker import EngFormatter, MaxNLocator, NullLocator

    means, every, marks = [], [], {}
    for index, entry in enumerate(entries):
        points = [
            (spent, _scale(metric) * summary(selection.test, metric).mean)
            for trial, selection in zip(entry.trials, _selected(entry), strict=True)
            if selection is not None
            and (spent := costs_of(entry, trial, selection.round)[name]) is not None
        ]
        if not points or not np.isfinite(points).all():
            continue
        x, y = np.array(points).T
        means.append((float(x.mean()), float(y.mean())))
        every += x.tolist()
        colour = style(index)["color"]
        axis.scatter(x, y, s=34, marker=marker(index), color=colour, alpha=0.4, linewidth=0)
        marks[entry.label] = axis.scatter(
            *means[-1],
            s=75,
            marker=marker(index),
            facecolor=colour if index < len(COLOURS) else PAPER,
            edgecolor=colour,
            linewidth=1.5,
        )
    on_front = front(means, higher_is_better=higher_is_better(metric))
    joined = np.array(sorted(p for p, on in zip(means, on_front, strict=True) if on)).T
    axis.step(*joined, where="post", color=INK, linestyle=(0, (3, 3)), linewidth=1, zorder=0)
    if least := is_wide(every):
        low, high, has_free = least / 2, 2 * max(every), min(every) == 0
        axis.set_xscale("symlog", linthresh=low, linscale=0.4)
        axis.set_xlim(-low / 4 if has_free else low, high)
        axis.set_xticks([0, *ticks(low, high)] if has_free else ticks(low, high))
    else:
        axis.set_xlim(0, 1.1 * max(every) or 1)
        axis.xaxis.set_major_locator(MaxNLocator(5))
    text, unit = COSTS[name]
    axis.xaxis.set_major_formatter(EngFormatter(unit=unit, sep=" "))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.tick_params(axis="x", labelsize="small")
    axis.set_xlabel(text)
    axis.grid(visible=True)
    return marks


def ahead(comparison: Table, ranked: Sequence[str]) -> Drawing | None:
    """Draw how far each method is ahead of training alone, in the order ``ranked``; None if no run
    has training alone."""
    labels = [row.label for row in comparison.rows]
    found = {one.method: one for verdict in comparison.verdicts for one in verdict.against_alone}
    shown = [label for label in ranked if label in found]
    if not shown:
        return None
    figure = new_figure(1.0 + 0.3 * len(shown))
    axis = figure.subplots()
    axis.axvline(0, color=INK, linestyle=(0, (4, 3)), linewidth=1)
    factor = _scale(comparison.metric)
    for y, label in enumerate(shown):
        index, one = labels.index(label), found[label]
        colour = style(index)["color"]
        if one.has_interval and math.isfinite(one.high - one.low):
            axis.hlines(y, factor * one.low, factor * one.high, color=colour, linewidth=2.4)
        axis.plot(factor * one.value, y, marker=marker(index), markersize=7, color=colour)
    axis.set_yticks(range(len(shown)), [short(label) for label in shown])
    axis.set_ylim(len(shown) - 0.5, -0.5)
    unit = " (points)" if is_percentage(comparison.metric) else unit_of(comparison.metric)
    axis.set_xlabel(f"ahead of training alone{unit}")
    axis.grid(visible=True, axis="x")
    return Drawing(
        "Ahead of training alone",
        figure,
        f"The figure shows how far the test {comparison.metric} of each method is ahead of that of "
        f"training alone{of_intervals(list(found.values()))}",
    )


def of_intervals(differences: Sequence[Difference]) -> str:
    """The end of a sentence on differences from training alone: what their intervals say."""
    if not any(one.has_interval for one in differences):
        clients = max(one.num_clients for one in differences)
        return f". {too_few(clients)} which lead or loss is chance."
    return (
        ", with its 95 % interval over clients and seeds. A lead or a loss whose interval "
        "contains 0 may be chance."
    )


def confusion(entry: Entry) -> Drawing | None:
    """Draw the personal models' confusion matrix at the selected rounds, over clients and seeds;
    None if the run keeps none."""
    from matplotlib.colors import PowerNorm

    counts = [
        tensors["personal/test"].sum(0)
        for trial, selection in zip(entry.trials, _selected(entry), strict=True)
        if selection is not None
        and "personal/test" in (tensors := trial.confusion(selection.round))
    ]
    if not counts:
        return None
    total = np.sum(counts, axis=0).astype(np.float64)  # [classes, classes]
    shares = 100 * total / np.maximum(total.sum(1, keepdims=True), 1)
    classes = list(next(iter(entry.run.partitions.values())).classes)
    figure = new_figure(min(8.0, max(3.2, 1.6 + 0.24 * len(classes))))
    axis = figure.subplots()
    image = axis.imshow(shares, aspect="auto", cmap="YlGnBu", norm=PowerNorm(0.5, vmin=0, vmax=100))
    if len(classes) <= 24:
        names = [short(name, 24) for name in classes]
        axis.set_yticks(range(len(names)), names)
        axis.set_xticks(range(len(names)), names, rotation=60, ha="right")
    if len(classes) <= 12:
        for (row, column), share in np.ndenumerate(shares):
            if total[row, column]:
                colour = "white" if share > 50 else "black"
                text = f"{total[row, column]:.0f}"
                axis.text(column, row, text, ha="center", va="center", size=8, color=colour)
    axis.set(xlabel="predicted class", ylabel="true class")
    figure.colorbar(image, ax=axis, label="examples of the true class (%)")
    return Drawing(
        f"Confusion of {entry.label}",
        figure,
        f"The figure shows how the personal models of {entry.label} label the clients' test "
        "examples at the rounds that the table reports, over all clients and seeds. The colour is "
        "the share among the examples of the true class. The run directory has the counts of each "
        "client.",
    )


def client_ticks(axis: object, order: Sequence[int], partition: Partition) -> None:
    """Write the clients' names, or else numbers, along x if there is room for them."""
    if len(order) <= 40:
        names = [short(partition.name(client), 24) for client in order]
        turned = {"rotation": 45, "ha": "right"} if max(map(len, names), default=0) > 3 else {}
        axis.set_xticks(range(len(order)), names, **turned)  # type: ignore[attr-defined]
    else:
        axis.set_xticks([])  # type: ignore[attr-defined]


def _label_order(counts: Floats, groups: Counts | None) -> Indices:
    """Sort clients by group, then by most frequent class, then by the examples of that class."""
    keys = [-counts.max(axis=1), counts.argmax(axis=1)]
    return np.lexsort(keys if groups is None else [*keys, groups])


def labels(run: Run) -> Drawing:
    """Draw the examples by client and class, for the run's first seed."""
    from matplotlib.colors import PowerNorm

    seed, partition = next(iter(run.partitions.items()))
    source = (
        f"This is the partition of {run.name} with seed {seed} and hash {partition.digest[:12]}. "
    )
    count = min(partition.clients, _MAX_COLUMNS)
    clients = np.linspace(0, partition.clients - 1, count).astype(np.int64)
    sample = (
        ""
        if count == partition.clients
        else f" Of {partition.clients:,} clients, {count:,} are shown."
    )
    if partition.labels is None:
        figure = new_figure(2.8)
        axis = figure.subplots()
        sizes = np.sort(partition.train)[::-1][clients]
        axis.fill_between(range(len(sizes)), sizes, step="mid", color=style(0)["color"], alpha=0.75)
        axis.set(xlabel="clients, largest first", ylabel="training examples", ylim=(0, None))
        caption = f"{source}Clients are sorted by their number of training examples.{sample}"
        return Drawing("Clients' data", figure, caption)
    counts = partition.labels[clients].astype(np.float64)  # [n, classes]
    groups = None if partition.clusters is None else partition.clusters[clients]
    order = _label_order(counts, groups)
    figure = new_figure(min(6.5, max(2.4, 1.3 + 0.22 * counts.shape[1])))
    axis = figure.subplots()
    image = axis.imshow(
        np.where(counts > 0, counts, np.nan)[order].T,
        aspect="auto",
        interpolation="none",
        cmap="YlGnBu",
        norm=PowerNorm(0.5, vmin=0, vmax=counts.max()),
    )
    if counts.shape[1] <= 24:
        names = [short(name, 24) for name in partition.classes]
        axis.set_yticks(range(counts.shape[1]), names)
    client_ticks(axis, clients[order].tolist(), partition)
    axis.set(xlabel=f"{count} clients", ylabel="class")
    figure.colorbar(image, ax=axis, label="examples")
    first_key = "" if groups is None else "cluster, then by "
    return Drawing(
        "Labels of the clients",
        figure,
        f"{source}The colour gives the examples of each client (column) and class (row), over all "
        f"splits; empty means none. Clients are ordered by {first_key}their most frequent "
        f"class.{sample}",
    )
