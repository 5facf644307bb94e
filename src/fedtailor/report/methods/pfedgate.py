"""What pFedGate learns: its gating layers, and the gates that they give."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ..drawing import COLOURS, Drawing, new_figure
from ..figures import client_ticks
from ..read import Trial, tensor_names, tensors
from ..select import Entry

Floats = NDArray[np.float64]
Bracket = tuple[list[float], list[float]]  # x and y of one join
Observation = tuple[int, Floats, Floats, NDArray[np.int64]]  # round, gates, sparsity, clients
_LAYER = ("gate.norm.", "gate.linear.", "gate.post.")
_STATISTICS = ("running_mean", "running_var")
_MOST_ROUNDS = 6  # histograms
_MOST_EXACT = 300  # clients; above it the dendrogram's leaves aren't sorted among equals


def _seen(path: Path) -> NDArray[np.int64]:
    """The clients that ever took part."""
    return np.flatnonzero(tensors(path, "__seen__")["__seen__"])


def _distances(path: Path, clients: NDArray[np.int64]) -> Floats:
    """Euclidean distances ``[n, n]`` of the clients' gating layers.

    The numbers of each tensor are divided by how much they vary from client to client, so that
    tensors of another scale count alike. One tensor is in memory at a time.

    Raises:
        InputError: there is no gating layer.
    """
    names = [
        name
        for name in tensor_names(path)
        if name.startswith(_LAYER) and not name.endswith(_STATISTICS)
    ]
    if not names:
        raise InputError(f"{path} has no tensors of a gating layer (gate.linear.*)")
    squares = np.zeros((len(clients), len(clients)))
    if not len(clients):
        return squares
    for name in names:
        x = tensors(path, name)[name][clients].reshape(len(clients), -1)
        x = x - x.mean(axis=0)
        variance = np.square(x, dtype=np.float64).mean()
        if variance > 0:
            product = (x @ x.T).astype(np.float64) / variance
            norms = np.diagonal(product)
            squares += norms[:, None] + norms - 2 * product
    np.fill_diagonal(squares, 0)
    return np.sqrt(np.maximum((squares + squares.T) / 2, 0))


def _tree(distances: Floats) -> tuple[list[int], list[Bracket]]:
    """Ward's clustering: the leaves from left to right, and the x and y of every join's bracket."""
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    n = len(distances)
    if n < 2:
        return list(range(n)), []
    Z = linkage(squareform(distances), "ward", optimal_ordering=n <= _MOST_EXACT)
    leaves = leaves_list(Z)
    x, y = np.zeros(2 * n - 1), np.zeros(2 * n - 1)
    x[leaves] = np.arange(n)
    brackets = []
    for node, (a, b, height, _) in enumerate(Z, start=n):
        a, b = sorted((int(a), int(b)), key=lambda child: x[child])
        x[node], y[node] = (x[a] + x[b]) / 2, height
        brackets.append(([x[a], x[a], x[b], x[b]], [y[a], height, height, y[b]]))
    return leaves.tolist(), brackets


def _agreement(distances: Floats, shares: Floats) -> str:
    """How far clients with near gating layers have like labels, in words; empty for few clients."""
    from scipy.spatial.distance import pdist, squareform
    from scipy.stats import spearmanr

    apart = pdist(shares, "cityblock") / 2
    near = squareform(distances)
    if len(near) < 3 or not np.ptp(apart) or not np.ptp(near):
        return ""
    rho = spearmanr(near, apart).statistic
    return (
        f" Over all {len(near):,} pairs of clients, the distance of their gating layers and the "
        f"difference of their label shares have a rank correlation of {rho:.2f} (1: near gating "
        "layers mean like labels; 0: nothing to do with each other)."
    )


def _dendrogram(axis: Any, n: int, brackets: Sequence[Bracket]) -> float:
    """Draw the joins of ``n`` leaves; where the axis of heights starts."""
    for x, y in brackets:
        axis.plot(x, y, color="#333333", linewidth=1.3 if n <= 60 else 0.8)
    low = 0.0
    if brackets:
        heights = [y[1] for _, y in brackets]
        low = max(0.0, min(heights) - max(0.25 * np.ptp(heights), 0.1 * max(heights)))
    else:
        text = f"clients that took part: {n}; nothing to cluster"
        axis.text(0.5, 0.5, text, transform=axis.transAxes, ha="center", va="center")
        axis.set_yticks([])
    axis.set(ylabel="distance (Ward)", ylim=(low, None), xlim=(-0.5, max(n, 1) - 0.5))
    axis.spines["bottom"].set_visible(False)
    return low


def _strip(axis: Any, shares: Floats, classes: Sequence[str]) -> Any:
    image = axis.imshow(
        np.where(shares > 0, shares, np.nan).T,
        aspect="auto",
        interpolation="none",
        cmap="YlGnBu",
        vmin=0,
        vmax=1,
    )
    if len(classes) <= 24:
        axis.set_yticks(range(len(classes)), [name[:24] for name in classes])
    axis.set_ylabel("class")
    return image


def clustering(entry: Entry) -> Drawing:
    """pFedGate: clients clustered by their gating layers, above the labels that they hold."""
    trial = entry.trials[0]
    partition = entry.run.partitions[trial.seed]
    path = trial.folder / "private.safetensors"
    clients = _seen(path)
    distances = _distances(path, clients)
    leaves, brackets = _tree(distances)
    order = clients[leaves].tolist()
    rows = 0 if partition.labels is None else len(partition.classes)
    strip = min(4.2, 0.7 + 0.22 * rows)
    figure = new_figure(3.0 + (strip if rows else 0))
    axes = figure.subplots(
        1 + bool(rows), 1, squeeze=False, sharex=True, height_ratios=[2.4, strip][: 1 + bool(rows)]
    )[:, 0]
    tree, last = axes[0], axes[-1]
    low = _dendrogram(tree, len(order), brackets)
    tree.set_title(f"seed {trial.seed}, after round {trial.commit.round}")
    tree.tick_params(bottom=False, labelbottom=not rows)
    caption = (
        "The gating layers that the clients have learned, clustered by Ward's method on Euclidean "
        "distances; each tensor's numbers are first divided by how much they vary from client to "
        "client. The lower two branches meet, the nearer the gating layers."
        f"{' The axis starts above 0.' if low else ''}"
    )
    if partition.labels is not None:
        counts = partition.labels[clients].astype(np.float64)  # [n, classes]
        shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
        if order:
            image = _strip(last, shares[leaves], partition.classes)
            figure.colorbar(image, ax=last, label="share of the\nclient's examples")
        caption += (
            " Below, the labels of the same clients in the same order (white: none)."
            + _agreement(distances, shares)
        )
    client_ticks(last, order)
    unseen = partition.clients - len(order)
    left_out = f"; left out, never took part: {unseen}" if unseen else ""
    last.set_xlabel(f"clients: {len(order)}{left_out}")
    return Drawing(f"Gating layers of {entry.label}", figure, caption)


def _observations(trial: Trial) -> list[Observation]:
    """Gates ``[n, L]`` and sparsity ``[n]`` by evaluated round, and whose they are.

    Raises:
        InputError: a round's file lacks them.
    """
    needed = ("client/gates", "client/sparsity", "clients")
    found = []
    for number, shown in trial.observed():
        if absent := [name for name in needed if name not in shown]:
            raise InputError(
                f"{trial.folder}: what was observed in round {number} lacks {', '.join(absent)}"
            )
        gates, sparsity, clients = (shown[name] for name in needed)
        found.append((number, gates.astype(np.float64), sparsity.astype(np.float64), clients))
    return found


def _budgets(entry: Entry, trial: Trial) -> list[float]:
    """s, or all of those that the clients take in turn.

    Raises:
        InputError: the run doesn't say.
    """
    for method in entry.run.experiment["methods"]:
        if method["label"] == trial.label and (s := method.get("sparsity")):
            return [float(value) for value in (s if isinstance(s, list) else [s])]
    raise InputError(f"{entry.run.path / 'experiment.json'} has no sparsity for {trial.label!r}")


def _few(count: int) -> list[int]:
    """Evenly spaced numbers below ``count``, the first and the last among them."""
    return sorted(set(np.linspace(0, count - 1, min(count, _MOST_ROUNDS)).round().astype(int)))


def _histograms(figure: Any, shown: Sequence[Observation]) -> None:
    panels = figure.subplots(1, len(shown), sharex=True, sharey=True, squeeze=False)[0]
    kept = np.concatenate([gates[gates != 0] for _, gates, _, _ in shown])
    low, high = (min(0.0, kept.min()), max(1.0, kept.max())) if len(kept) else (0.0, 1.0)
    edges = np.linspace(low, high, 41)
    for axis, (number, gates, _, _) in zip(panels, shown, strict=True):
        counts, _ = np.histogram(gates[gates != 0], edges)
        axis.stairs(100 * counts / gates.size, edges, fill=True, color=COLOURS[0])
        dropped = 100 * (gates == 0).mean()
        axis.set_title(f"round {number}\n{dropped:.0f} % dropped")
    panels[0].set_ylim(bottom=0)
    panels[0].set_ylabel("share of all gates (%)")
    figure.supxlabel("gate of a kept block", fontsize="medium")


def _dropped(axis: Any, found: Sequence[Observation]) -> None:
    rounds = [number for number, *_ in found]
    by_client = [100 * (gates == 0).mean(axis=1) for _, gates, _, _ in found]
    _line(axis, rounds, by_client, COLOURS[1], "")
    axis.set(title="dropped blocks", xlabel="round", ylabel="share of blocks (%)", ylim=(0, 100))


def _achieved(axis: Any, found: Sequence[Observation], budgets: Sequence[float]) -> None:
    rounds = [number for number, *_ in found]
    for index, s in enumerate(distinct := sorted(set(budgets))):
        turns = [turn for turn, value in enumerate(budgets) if value == s]
        theirs = [
            sparsity[np.isin(clients % len(budgets), turns)] for _, _, sparsity, clients in found
        ]
        colour = COLOURS[index % len(COLOURS)]
        axis.axhline(s, color=colour, linestyle="--", linewidth=1.0)
        _line(axis, rounds, theirs, colour, f"s = {s:g}")
    axis.set(title="parameters in kept blocks", xlabel="round")
    axis.set(ylabel="share of parameters", ylim=(0, min(1.0, 1.15 * distinct[-1])))
    axis.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))


def _line(axis: Any, rounds: Sequence[int], values: Sequence[Floats], colour: str, of: str) -> None:
    """Means over clients with the range from the 10th to the 90th percentile."""
    there = [(number, x) for number, x in zip(rounds, values, strict=True) if len(x)]
    if not there:
        return
    at = [number for number, _ in there]
    low, high = zip(*(np.percentile(x, (10, 90)) for _, x in there), strict=True)
    axis.plot(at, [x.mean() for _, x in there], color=colour, marker="o", markersize=3.5, label=of)
    axis.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
    axis.grid(visible=True)
    axis.xaxis.get_major_locator().set_params(integer=True)


def gates_by_round(entry: Entry) -> Drawing:
    """pFedGate: the histogram of all gates over rounds, dropped blocks and achieved sparsity."""
    trial = entry.trials[0]
    found = [seen for seen in _observations(trial) if seen[1].size]
    budgets = _budgets(entry, trial)
    figure = new_figure(5.4)
    title = f"Gates of {entry.label}"
    if not found:
        figure.text(0.5, 0.5, "no round evaluated yet", ha="center", va="center")
        return Drawing(title, figure, "Gates are recorded when a round is evaluated; none is yet.")
    upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=[1.1, 1])[:, 0]
    _histograms(upper, [found[at] for at in _few(len(found))])
    left, right = lower.subplots(1, 2, sharex=True)
    _dropped(left, found)
    _achieved(right, found, budgets)
    return Drawing(
        title,
        figure,
        f"What the gating layers of seed {trial.seed} make of their clients' validation examples. "
        "Above: the gates of kept blocks, all clients and blocks together, at some of the "
        "evaluated rounds; what is missing to 100 % are dropped blocks, whose gate is 0. Below: "
        "the share of dropped blocks and the share of the model's parameters that lie in kept "
        "ones (the sparsity achieved), which may not exceed s (dashed); means over clients, bands "
        "from the 10th to the 90th percentile. Where every example has gates of its own, a "
        "client's are means over its examples.",
    )
