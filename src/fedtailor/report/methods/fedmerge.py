"""FedMerge's figure: every client's weights of the server's models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ..drawing import Drawing, around, new_figure
from ..read import Trial
from ..records import Counts
from ..select import Entry

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.image import AxesImage

_MAX_ROUNDS = 4  # panels side by side
_MAX_NAMES = 26  # clients whose numbers fit beside the map

Weights = NDArray[np.float64]


def _even_positions(count: int) -> list[int]:
    """Return up to `_MAX_ROUNDS` positions from the first to the last of ``count``."""
    return [round(position) for position in np.linspace(0, count - 1, min(count, _MAX_ROUNDS))]


def _maps(trial: Trial) -> tuple[list[int], list[tuple[int, Weights]]]:
    """Return the clients, and their weights ``[n, d]`` in some rounds.

    Weights that never changed are those of the last round alone.
    """
    clients: list[int] = []
    maps: list[tuple[int, Weights]] = []
    for number, tensors in trial.diagnostics():
        if missing := {"server/weights", "server_clients"} - tensors.keys():
            names = ", ".join(sorted(missing))
            raise InputError(f"{trial.folder}: the file of round {number} lacks {names}")
        clients = tensors["server_clients"].tolist()
        maps.append((number, tensors["server/weights"].astype(np.float64)))
    if maps and all(np.array_equal(w, maps[0][1]) for _, w in maps):
        return clients, maps[-1:]
    return clients, [maps[position] for position in _even_positions(len(maps))]


def _order(clients: Sequence[int], last: Weights, clusters: Counts | None) -> list[int]:
    """Sort the clients by true cluster and number, or else by their strongest model."""
    positions = range(len(clients))
    if clusters is not None:
        return sorted(positions, key=lambda i: (clusters[clients[i]], clients[i]))
    strongest = last.argmax(axis=1)
    return sorted(positions, key=lambda i: (strongest[i], -last[i].max()))


def _draw(axis: Axes, w: Weights, groups: Sequence[int], norm: Normalize) -> AxesImage:
    """Draw a map ``[n, d]`` with a dashed border wherever the clients' group changes."""
    image = axis.imshow(w, aspect="auto", interpolation="none", norm=norm, cmap="PuOr")
    axis.set_xticks(range(0, w.shape[1], 1 + (w.shape[1] - 1) // 10))
    axis.set_yticks([])
    for edge in np.flatnonzero(np.diff(groups)):
        axis.axhline(edge + 0.5, color="white", linewidth=1.6)
        axis.axhline(edge + 0.5, color="black", linewidth=0.8, linestyle=(0, (4, 3)))
    return image


def weight_heat_map(entry: Entry) -> Drawing:
    """Draw clients by models, with a few rounds side by side and a row of panels a seed."""
    from matplotlib.colors import TwoSlopeNorm

    trials = [(trial, *_maps(trial)) for trial in entry.trials]
    columns = max(1, *(len(maps) for _, _, maps in trials))
    shown = [w for _, _, maps in trials for _, w in maps]
    equal = 1 / shown[0].shape[1] if shown else 0.5  # where all weights begin
    low, high = around(equal, np.concatenate([w.ravel() for w in shown]) if shown else np.empty(0))
    norm = TwoSlopeNorm(equal, low, high)
    max_clients = max((len(clients) for _, clients, _ in trials), default=0)
    figure = new_figure(0.8 + len(trials) * min(4.8, 1.0 + 0.11 * max(max_clients, 12)))
    panels = figure.subplots(len(trials), columns, squeeze=False, sharex=True)
    image = None
    for row, (trial, clients, maps) in zip(panels, trials, strict=True):
        partition = entry.run.partitions[trial.seed]
        clusters = partition.clusters
        order = _order(clients, maps[-1][1], clusters) if maps else []
        groups = [0 if clusters is None else int(clusters[clients[i]]) for i in order]
        for axis, (number, w) in zip(row, maps, strict=False):
            image = _draw(axis, w[order], groups, norm)
            axis.set_title(f"round {number}")
        for axis in row[len(maps) :]:
            axis.set_axis_off()
        if len(order) <= _MAX_NAMES:
            row[0].set_yticks(range(len(order)), [partition.name(clients[i])[:24] for i in order])
        seed = f"seed {trial.seed}: " if len(trials) > 1 else ""
        row[0].set_ylabel(f"{seed}{len(order)} clients")
    for axis in panels[-1]:
        axis.set_xlabel("model")
    if image is None:
        figure.text(0.5, 0.5, "no round is evaluated yet", ha="center", va="center")
    else:
        figure.colorbar(image, ax=panels.ravel().tolist(), label="weight", aspect=30, pad=0.01)
    has_truth = any(entry.run.partitions[trial.seed].clusters is not None for trial in entry.trials)
    order_words = "true cluster (dashed borders)" if has_truth else "strongest model"
    constant = "" if columns > 1 else " Weights that never change are shown once."
    return Drawing(
        f"Merging weights of {entry.label}",
        figure,
        "The colour gives the weight of each of the server's models (columns) in each client's "
        "model (rows), after the round in the title; a client's weights sum to 1. Clients are "
        f"ordered by {order_words}. The colour in the middle is {equal:.2f}: equal weights, as "
        f"at the start. Colours go from {low:.3f} to {high:.3f}.{constant}",
    )
