"""What FedSQ claims: fewer rounds to the best model, inside patterns that keep their sense."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..drawing import Drawing, marker, new_figure, shared_legend, style
from ..read import Trial
from ..select import Entry, Metric, by_round, metric_of, summary

Floats = NDArray[np.float64]


def _best_so_far(trial: Trial, metric: Metric) -> tuple[list[int], Floats]:
    """Evaluated rounds, and the best mean validation result of personal models up to each."""
    found = by_round(trial, "personal", "validation")
    rounds = sorted(found)
    means = np.array([summary(found[number], metric).mean for number in rounds])
    better = np.maximum if metric == "accuracy" else np.minimum
    return rounds, better.accumulate(means) * (100 if metric == "accuracy" else 1)


def rounds_to_best(entry: Entry) -> Drawing | None:
    """The best validation result so far, of FedSQ and of the run's other methods; None without
    validation results."""
    metric = metric_of([entry.run])
    groups: dict[str, list[Trial]] = {}
    for trial in entry.run.trials:
        if trial.method != "fedsq":
            groups.setdefault(trial.label, []).append(trial)
    groups[entry.label] = list(entry.trials)
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(3.9)
    axis: Any = figure.subplots()
    handles, names = [], []
    for index, (label, trials) in enumerate(groups.items()):
        firsts = []
        for trial in trials:
            rounds, best = _best_so_far(trial, metric)
            if not rounds:
                continue
            first = int(np.argmax(best == best[-1]))
            firsts.append((rounds[first], best[first]))
            (line,) = axis.plot(
                rounds, best, drawstyle="steps-post", linewidth=1.5, alpha=0.8, **style(index)
            )
            axis.plot(
                *firsts[-1],
                marker=marker(index),
                markersize=8,
                markerfacecolor="white",
                markeredgecolor=line.get_color(),
                markeredgewidth=1.6,
                linestyle="none",
                zorder=3,
            )
        if firsts:
            number, value = np.mean(firsts, axis=0)
            unit = "%" if metric == "accuracy" else ""
            handles.append(line)
            names.append(f"{label}: {value:.1f}{unit} at round {number:.3g}")
    if not handles:
        return None
    unit = " (%)" if metric == "accuracy" else ""
    axis.set(xlabel="round", ylabel=f"best mean validation {metric} so far{unit}")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(visible=True)
    shared_legend(figure, handles, names)
    return Drawing(
        f"Rounds to the best of {entry.label}",
        figure,
        f"The best mean validation {metric} over clients that each method has reached by a round; "
        "one line a seed. The marker is the first round with the best value of all; the legend "
        "gives both, as means over seeds.",
    )


def mask_agreement(entry: Entry) -> Drawing | None:
    """The share of units that w_QK alone would put on the piece that w_SK fixes, by activation;
    None if nothing is gated."""
    curves = _agreement(entry.trials)
    if not curves:
        return None
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.ticker import MaxNLocator

    rounds = sorted(curves)
    values = 100 * np.stack([curves[number] for number in rounds])  # [rounds, activations]
    count = values.shape[1]
    depth = Normalize(1, max(count, 2))
    colours = colormaps["viridis"].reversed()
    figure = new_figure(3.9)
    axis = figure.subplots()
    for at in range(count):
        axis.plot(
            [0, *rounds],
            [100.0, *values[:, at]],
            color=colours(depth(at + 1)),
            linewidth=1.5,
            marker="o",
            markersize=2.5,
        )
    axis.set(xlabel="round", ylabel="units on the fixed piece by themselves (%)")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(visible=True)
    bar = figure.colorbar(ScalarMappable(depth, colours), ax=axis)
    bar.set_label("gated activation, from the input up")
    bar.set_ticks(sorted({1, *np.linspace(1, count, min(count, 6)).round().astype(int).tolist()}))
    return Drawing(
        f"Mask agreement of {entry.label}",
        figure,
        "How much of the pretrained activation pattern the trained weights would still choose by "
        "themselves: the share of units that they put on the same linear piece (smooth activations:"
        " the same side of 0), in the gated network, on up to 64 validation examples a client. "
        "Means over clients and seeds; one line an activation. All start at 100.",
    )


def _agreement(trials: Sequence[Trial]) -> dict[int, Floats]:
    """By round, the mean over clients and seeds, ``[activations]``."""
    found: dict[int, list[Floats]] = {}
    for trial in trials:
        for number, tensors in trial.observed():
            if "client/agreement" in tensors:
                found.setdefault(number, []).append(tensors["client/agreement"].mean(0))
    return {number: np.mean(each, axis=0) for number, each in found.items()}
