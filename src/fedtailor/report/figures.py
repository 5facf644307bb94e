"""The figures that every comparison has. Matplotlib is imported where something is drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .drawing import Drawing, marker, new_figure, shared_legend, style
from .read import Counts, Evaluation, Run
from .select import Choice, Entry, Metric, by_round, choose, summary

Floats = NDArray[np.float64]
Indices = NDArray[np.int64]
_MOST_COLUMNS = 2000  # clients side by side
_MOST_DOTS = 300  # clients a method; above it the box alone is drawn


def _scale(metric: Metric) -> float:
    return 100.0 if metric == "accuracy" else 1.0


def _axis(metric: Metric) -> str:
    return "accuracy (%)" if metric == "accuracy" else "loss (nats a token)"


def _choices(entry: Entry, metric: Metric) -> list[Choice | None]:
    return [choose(trial, "personal", metric) for trial in entry.trials]


def _curves(entry: Entry, split: str, metric: Metric) -> list[dict[int, float]]:
    return [
        {
            number: _scale(metric) * summary(found, metric).mean
            for number, found in by_round(trial, "personal", split).items()
        }
        for trial in entry.trials
    ]


def convergence(shown: Sequence[Entry], metric: Metric) -> Drawing:
    """Validation and test results of the personal models by round."""
    figure = new_figure(4.0 + 0.07 * len(shown))
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    handles = []
    for index, entry in enumerate(shown):
        choices = _choices(entry, metric)
        for axis, split in zip(axes, ("validation", "test"), strict=True):
            curves = _curves(entry, split, metric)
            rounds = sorted(set().union(*curves))
            values = [[curve[r] for curve in curves if r in curve] for r in rounds]
            mean = np.array([np.mean(at) for at in values])
            std = np.array([np.std(at, ddof=1) if len(at) > 1 else 0.0 for at in values])
            (line,) = axis.plot(rounds, mean, linewidth=1.6, **style(index))
            axis.fill_between(
                rounds, mean - std, mean + std, color=line.get_color(), alpha=0.15, lw=0
            )
            for curve, choice in zip(curves, choices, strict=True):
                if choice is not None and choice.round in curve:
                    axis.plot(
                        choice.round,
                        curve[choice.round],
                        marker=marker(index),
                        markersize=5.5,
                        markerfacecolor="white",
                        markeredgecolor=line.get_color(),
                        markeredgewidth=1.4,
                        linestyle="none",
                    )
        handles.append(line)
    for axis, split in zip(axes, ("validation", "test"), strict=True):
        axis.set(title=split, xlabel="round")
        axis.grid(visible=True)
        axis.xaxis.get_major_locator().set_params(integer=True)
    axes[0].set_ylabel(f"mean {_axis(metric)}")
    shared_legend(figure, handles, [entry.label for entry in shown])
    return Drawing(
        "Convergence",
        figure,
        f"Mean {metric} of the personal models over clients, by round, on validation data (left) "
        "and test data (right). Lines are means over the seeds that reached the round, bands one "
        "sample standard deviation. Hollow markers are the rounds reported, one a seed.",
    )


def _per_client(evaluation: Evaluation, metric: Metric) -> list[float]:
    values = evaluation.accuracy if metric == "accuracy" else evaluation.loss
    return [
        np.nan if value is None else _scale(metric) * value
        for value, count in zip(values, evaluation.num_examples, strict=True)
        if count
    ]


def _pooled(entry: Entry, metric: Metric) -> Floats:
    made = [choice for choice in _choices(entry, metric) if choice is not None]
    x = np.array([value for c in made for value in _per_client(c.test, metric)], dtype=np.float64)
    return np.sort(x[np.isfinite(x)])


def distribution(shown: Sequence[Entry], metric: Metric) -> Drawing:
    """Test results of the single clients at the chosen round."""
    figure = new_figure(max(3.4, 1.6 + 0.48 * len(shown)))
    box, curve = figure.subplots(1, 2)
    for index, entry in enumerate(shown):
        x = _pooled(entry, metric)
        if not len(x):
            continue
        colour = style(index)["color"]
        line = {"color": colour, "linewidth": 1.4}
        box.boxplot(
            x,
            positions=[index],
            orientation="horizontal",
            widths=0.55,
            whis=(10, 90),
            showfliers=False,
            boxprops=line,
            whiskerprops=line,
            capprops=line,
            medianprops={"color": colour, "linewidth": 2.6},
        )
        if len(x) <= _MOST_DOTS:
            spread = 0.2 * np.sin(2.4 * np.arange(len(x)))
            box.scatter(x, index + spread, s=11, color=colour, alpha=0.35, linewidth=0)
        share = np.linspace(0, 100, min(len(x), 201)) if len(x) > 1 else np.array([50.0])
        curve.plot(share, np.percentile(x, share), label=entry.label, linewidth=1.6, **style(index))
    box.set_yticks(range(len(shown)), [entry.label for entry in shown])
    box.set_ylim(len(shown) - 0.5, -0.5)
    box.set_xlabel(f"test {_axis(metric)}")
    box.grid(visible=True, axis="x")
    curve.set(xlabel="share of clients (%), sorted", ylabel=f"test {_axis(metric)}", xlim=(0, 100))
    curve.grid(visible=True)
    shared_legend(figure, *curve.get_legend_handles_labels())
    return Drawing(
        "Clients",
        figure,
        f"Test {metric} of each client's personal model at the round reported, all seeds together. "
        "Left: median, quartiles, whiskers from the 10th to the 90th percentile; one dot a client "
        f"(up to {_MOST_DOTS} a method). Right: the same results, sorted.",
    )


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers between ``low`` and ``high``, the fewer a decade the more decades there are."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 1.5, 2, 3, 5, 7) if len(powers) <= 2 else (1, 2, 5) if len(powers) <= 4 else (1,)
    return [s * 10.0**p for p in powers for s in steps if low <= s * 10.0**p <= high]


def cost(shown: Sequence[Entry], metric: Metric) -> Drawing:
    """Traffic up to the chosen round against test results."""
    from matplotlib.ticker import EngFormatter, NullLocator

    figure = new_figure(3.8 + 0.07 * len(shown))
    axis = figure.subplots()
    traffic: list[float] = []
    for index, entry in enumerate(shown):
        points = []
        for trial, choice in zip(entry.trials, _choices(entry, metric), strict=True):
            if choice is not None:
                used = [r.bytes_down + r.bytes_up for r in trial.history if r.round <= choice.round]
                clients = entry.run.partitions[trial.seed].clients
                result = _scale(metric) * summary(choice.test, metric).mean
                points.append((sum(used) / clients, result))
        if not points:
            continue
        x, y = np.array(points).T
        traffic += x.tolist()
        colour = style(index)["color"]
        axis.scatter(x, y, s=34, marker=marker(index), color=colour, alpha=0.4, linewidth=0)
        axis.scatter(
            x.mean(),
            y.mean(),
            s=75,
            marker=marker(index),
            facecolor=colour if index < 7 else "white",
            edgecolor=colour,
            linewidth=1.5,
            label=entry.label,
        )
    if positive := [value for value in traffic if value > 0]:
        low, high = min(positive) / 2, 2 * max(positive)
        axis.set_xscale("symlog", linthresh=low, linscale=0.4)
        axis.set_xlim(-low / 4 if min(traffic) == 0 else low, high)
        axis.set_xticks([0, *_ticks(low, high)] if min(traffic) == 0 else _ticks(low, high))
    axis.xaxis.set_major_formatter(EngFormatter(unit="B", sep=" "))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set(xlabel="bytes a client, down and up, until the round reported")
    axis.set_ylabel(f"mean test {_axis(metric)}")
    axis.grid(visible=True)
    shared_legend(figure, *axis.get_legend_handles_labels())
    return Drawing(
        "Cost against result",
        figure,
        "All bytes sent and received until the round reported, divided by the number of clients, "
        f"against mean test {metric} of the personal models. Small marks are seeds, large "
        "ones their mean.",
    )


def client_ticks(axis: object, order: Sequence[int]) -> None:
    """Name the clients along x where there is room for their numbers."""
    if len(order) <= 40:
        axis.set_xticks(range(len(order)), order)  # type: ignore[attr-defined]
    else:
        axis.set_xticks([])  # type: ignore[attr-defined]


def _label_order(counts: Floats, groups: Counts | None) -> Indices:
    """By group, then by the most frequent class, then by how many of it."""
    keys = [-counts.max(axis=1), counts.argmax(axis=1)]
    return np.lexsort(keys if groups is None else [*keys, groups])


def labels(run: Run) -> Drawing:
    """Examples by client and class for the run's first seed."""
    from matplotlib.colors import PowerNorm

    seed, partition = next(iter(run.partitions.items()))
    where = f"Partition of {run.name}, seed {seed}, hash {partition.digest[:12]}. "
    # as many as can be told apart, from the first to the last
    count = min(partition.clients, _MOST_COLUMNS)
    shown = np.linspace(0, partition.clients - 1, count).astype(np.int64)
    some = "" if count == partition.clients else f" {count:,} of {partition.clients:,} clients."
    if partition.labels is None:
        figure = new_figure(2.8)
        axis = figure.subplots()
        sizes = np.sort(partition.train)[::-1][shown]
        axis.fill_between(range(len(sizes)), sizes, step="mid", color=style(0)["color"], alpha=0.75)
        axis.set(xlabel="clients, largest first", ylabel="training examples", ylim=(0, None))
        caption = f"{where}Training examples a client, sorted.{some}"
        return Drawing("Clients' data", figure, caption)
    counts = partition.labels[shown].astype(np.float64)  # [n, classes]
    groups = None if partition.clusters is None else partition.clusters[shown]
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
        axis.set_yticks(range(counts.shape[1]), [name[:24] for name in partition.classes])
    client_ticks(axis, shown[order].tolist())
    axis.set(xlabel=f"{len(shown)} clients", ylabel="class")
    figure.colorbar(image, ax=axis, label="examples")
    grouped = "" if groups is None else "cluster, then by "
    return Drawing(
        "Labels of the clients",
        figure,
        f"{where}Examples of all splits by client and class (white: none); clients ordered by "
        f"{grouped}their most frequent class.{some}",
    )
