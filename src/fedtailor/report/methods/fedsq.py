"""FedSQ's figures, on its two claims: few rounds to the best model, and patterns that still fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..drawing import Drawing, hollow, new_figure, shared_legend, short, style
from ..read import Trial
from ..select import Entry, Metric, by_round, higher_is_better, is_percentage, metric_of, summary

Floats = NDArray[np.float64]


def best_so_far(trial: Trial, metric: Metric) -> tuple[list[int], Floats]:
    """Return evaluated rounds, and the best mean validation result up to each of them."""
    evaluations = by_round(trial, "personal", "validation")
    rounds = sorted(evaluations)
    means = np.array([summary(evaluations[number], metric).mean for number in rounds])
    better = np.maximum if higher_is_better(metric) else np.minimum
    return rounds, better.accumulate(means) * (100 if is_percentage(metric) else 1)


def rounds_to_best(entry: Entry) -> Drawing | None:
    """Draw the best validation result so far, of FedSQ and of the run's other methods.

    None without validation results.
    """
    metric = metric_of([entry.run])
    methods: dict[str, list[Trial]] = {}
    for trial in entry.run.trials:
        if trial.method != "fedsq":
            methods.setdefault(trial.label, []).append(trial)
    methods[entry.label] = list(entry.trials)
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(3.9)
    axis: Any = figure.subplots()
    handles, names = [], []
    for index, (label, trials) in enumerate(methods.items()):
        best_rounds = []
        for trial in trials:
            rounds, best = best_so_far(trial, metric)
            if not rounds:
                continue
            first = int(np.argmax(best == best[-1]))
            best_rounds.append((rounds[first], best[first]))
            (line,) = axis.plot(
                rounds, best, drawstyle="steps-post", linewidth=1.5, alpha=0.8, **style(index)
            )
            axis.plot(*best_rounds[-1], zorder=3, **hollow(index, line.get_color(), size=8))
        if best_rounds:
            number, value = np.mean(best_rounds, axis=0)
            unit = "%" if is_percentage(metric) else ""
            handles.append(line)
            names.append(f"{short(label)}: {value:.1f}{unit} at round {number:.3g}")
    if not handles:
        return None
    unit = " (%)" if is_percentage(metric) else ""
    axis.set(xlabel="round", ylabel=f"best mean validation {metric} so far{unit}")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.grid(visible=True)
    shared_legend(figure, handles, names)
    return Drawing(
        f"Rounds to the best of {entry.label} and of the other methods",
        figure,
        f"The figure shows the best mean validation {metric} over clients that each method has "
        "reached by a round, with one line for each seed. The marker is the first round with the "
        "best value of the whole run; the legend gives that round and value, as means over seeds.",
    )


def mask_agreement(entry: Entry) -> Drawing | None:
    """Draw, by activation, the share of units that w_QK would put on the piece fixed by w_SK.

    None if no activation is gated.
    """
    curves = agreement(entry.trials)
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
    for activation in range(count):
        axis.plot(
            [0, *rounds],
            [100.0, *values[:, activation]],
            color=colours(depth(activation + 1)),
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
        "The figure shows how much of the pretrained activation pattern the trained weights would "
        "select by themselves: the share of units that they put on the same linear piece (for "
        "smooth activations, on the same side of 0) in the gated network, on up to 64 validation "
        "examples of each client. Each line is an activation, and its values are means over "
        "clients and seeds. All lines start at 100.",
    )


def agreement(trials: Sequence[Trial]) -> dict[int, Floats]:
    """Return by round the mean over clients and seeds, ``[activations]``."""
    by_number: dict[int, list[Floats]] = {}
    for trial in trials:
        for number, tensors in trial.diagnostics():
            if "client/agreement" in tensors:
                by_number.setdefault(number, []).append(tensors["client/agreement"].mean(0))
    return {number: np.mean(seeds, axis=0) for number, seeds in by_number.items()}
