"""pFedGate's figures: clusters of its gating layers, and the gates that these layers compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ..checked import record
from ..drawing import COLOURS, INK, Drawing, new_figure, short
from ..figures import client_ticks
from ..read import Trial
from ..records import Counts, Partition, Sparsity
from ..select import Entry
from ..tensors import tensor_names, tensors

Floats = NDArray[np.float64]
Bracket = tuple[list[float], list[float]]  # x and y of one merge of two clusters
Record = tuple[int, Floats, Floats, NDArray[np.int64]]  # round, gates, sparsity, clients
_LAYER = ("gate.norm.", "gate.linear.", "gate.post.")
_STATISTICS = ("running_mean", "running_var")
_MAX_HISTOGRAMS = 6
_MAX_SORTED = 300  # clients; the leaves of a dendrogram with more of them have any valid order


def _trained_clients(path: Path) -> NDArray[np.int64]:
    """Return the clients that ever took part."""
    return np.flatnonzero(tensors(path, "__seen__")["__seen__"])


def _distances(path: Path, clients: NDArray[np.int64]) -> Floats:
    """Compute the Euclidean distances ``[n, n]`` between the clients' gating layers.

    The numbers of each tensor are divided by their standard deviation over clients, so that all
    tensors count the same whatever their scale. One tensor is in memory at a time.

    Raises:
        InputError: the file has no gating layer.
    """
    squares = np.zeros((len(clients), len(clients)))
    if not len(clients):
        return squares
    names = [
        name
        for name in tensor_names(path)
        if name.startswith(_LAYER) and not name.endswith(_STATISTICS)
    ]
    if not names:
        raise InputError(f"{path} has no tensors of a gating layer (gate.linear.*)")
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


@dataclass(frozen=True)
class GatingTree:
    """Clients from left to right, joined by the distance of their gating layers."""

    clients: list[int]
    brackets: list[Bracket]
    sizes: list[int]  # clients below each bracket
    low: float  # where the axis of distances starts
    shares: Floats | None  # of the classes among a client's examples, [n, classes]
    label_correlation: float | None  # of the clients' distances with those of their label shares
    caption: str


def lie_at_sites(trial: Trial) -> bool:
    """Whether the clients' gating layers are not here, as after a run over Flower."""
    has_committed = "private" in trial.commit.checksums
    return not has_committed and not (trial.folder / "private.safetensors").exists()


def gating_tree(trial: Trial, partition: Partition) -> GatingTree:
    """Cluster the clients that took part by Ward's method."""
    path = trial.folder / "private.safetensors"
    clients = _trained_clients(path)
    distances = _distances(path, clients)
    leaves, brackets, sizes = _tree(distances)
    heights = [y[1] for _, y in brackets]
    low = 0.0
    if heights:
        low = max(0.0, min(heights) - max(0.25 * float(np.ptp(heights)), 0.1 * max(heights)))
    caption = (
        "The tree shows the clients' gating layers, clustered by Ward's method on Euclidean "
        "distances; each tensor's numbers are first divided by their standard deviation over "
        "clients. The lower two branches meet, the more similar are the gating layers."
        f"{' The axis starts above 0.' if low else ''}"
    )
    shares, correlation = None, None
    if partition.labels is not None:
        of_labels = _label_shares(partition.labels, clients)
        shares, correlation = of_labels[leaves], _correlation(distances, of_labels)
        caption += (
            " The map below shows the labels of the same clients in the same order (empty means "
            "none)." + _agreement(correlation, len(clients))
        )
    return GatingTree(clients[leaves].tolist(), brackets, sizes, low, shares, correlation, caption)


def _tree(distances: Floats) -> tuple[list[int], list[Bracket], list[int]]:
    """Cluster by Ward's method: return the leaves from left to right, and a bracket and the number
    of leaves a merge."""
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    n = len(distances)
    if n < 2:
        return list(range(n)), [], []
    Z = linkage(squareform(distances), "ward", optimal_ordering=n <= _MAX_SORTED)
    leaves = leaves_list(Z)
    x, y = np.zeros(2 * n - 1), np.zeros(2 * n - 1)
    x[leaves] = np.arange(n)
    brackets = []
    for node, (a, b, height, _) in enumerate(Z, start=n):
        a, b = sorted((int(a), int(b)), key=lambda child: x[child])
        x[node], y[node] = (x[a] + x[b]) / 2, height
        brackets.append(([x[a], x[a], x[b], x[b]], [y[a], height, height, y[b]]))
    return leaves.tolist(), brackets, Z[:, 3].astype(int).tolist()


def _label_shares(labels: Counts, clients: NDArray[np.int64]) -> Floats:
    counts = labels[clients].astype(np.float64)  # [n, classes]
    shares: Floats = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return shares


def _correlation(distances: Floats, shares: Floats) -> float | None:
    """Return the rank correlation, over all pairs of clients, of their gating layers' distance and
    the difference of their label shares; None for few clients or equal ones."""
    from scipy.spatial.distance import pdist, squareform
    from scipy.stats import spearmanr

    label_distances = pdist(shares, "cityblock") / 2
    layer_distances = squareform(distances)
    if len(layer_distances) < 3 or not np.ptp(label_distances) or not np.ptp(layer_distances):
        return None
    return float(spearmanr(layer_distances, label_distances).statistic)


def _agreement(rho: float | None, clients: int) -> str:
    """Say how much similar gating layers mean similar labels; empty if that is unknown."""
    if rho is None:
        return ""
    pairs = clients * (clients - 1) // 2
    return (
        f" Over all {pairs:,} pairs of clients, the distance of their gating layers and the "
        f"difference of their label shares have a rank correlation of {rho:.2f} (1 means that "
        "clients with similar gating layers have similar labels, 0 that there is no relation)."
    )


def _dendrogram(axis: Any, tree: GatingTree) -> None:
    """Draw the merges of clients."""
    n = len(tree.clients)
    for x, y in tree.brackets:
        axis.plot(x, y, color=INK, linewidth=1.3 if n <= 60 else 0.8)
    if not tree.brackets:
        text = f"clients that took part: {n}; nothing to cluster"
        axis.text(0.5, 0.5, text, transform=axis.transAxes, ha="center", va="center")
        axis.set_yticks([])
    axis.set(ylabel="distance (Ward)", ylim=(tree.low, None), xlim=(-0.5, max(n, 1) - 0.5))
    axis.spines["bottom"].set_visible(False)


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
        axis.set_yticks(range(len(classes)), [short(name, 24) for name in classes])
    axis.set_ylabel("class")
    return image


def clustering(entry: Entry) -> Drawing | None:
    """Draw clients clustered by their gating layers, above the labels of their examples.

    None where the gating layers lie at the sites.
    """
    trial = entry.trials[0]
    if lie_at_sites(trial):
        return None
    partition = entry.run.partitions[trial.seed]
    tree = gating_tree(trial, partition)
    order = tree.clients
    rows = 0 if partition.labels is None else len(partition.classes)
    strip = min(4.2, 0.7 + 0.22 * rows)
    figure = new_figure(3.0 + (strip if rows else 0))
    axes = figure.subplots(
        1 + bool(rows), 1, squeeze=False, sharex=True, height_ratios=[2.4, strip][: 1 + bool(rows)]
    )[:, 0]
    upper, last = axes[0], axes[-1]
    _dendrogram(upper, tree)
    upper.set_title(f"seed {trial.seed}, after round {trial.commit.round}")
    upper.tick_params(bottom=False, labelbottom=not rows)
    if tree.shares is not None and order:
        image = _strip(last, tree.shares, partition.classes)
        figure.colorbar(image, ax=last, label="share of the\nclient's examples")
    client_ticks(last, order, partition)
    untrained = partition.clients - len(order)
    left_out = f"; left out, never took part: {untrained}" if untrained else ""
    last.set_xlabel(f"clients: {len(order)}{left_out}")
    return Drawing(f"Gating layers of {entry.label}", figure, tree.caption)


def records(trial: Trial) -> list[Record]:
    """Read the gates ``[n, L]``, the sparsity ``[n]`` and the clients ``[n]`` of evaluated rounds.

    Raises:
        InputError: a round's file lacks one of them.
    """
    needed = ("client/gates", "client/sparsity", "clients")
    found = []
    for number, content in trial.diagnostics():
        if missing := [name for name in needed if name not in content]:
            raise InputError(
                f"{trial.folder}: the file of round {number} lacks {', '.join(missing)}"
            )
        gates, sparsity, clients = (content[name] for name in needed)
        found.append((number, gates.astype(np.float64), sparsity.astype(np.float64), clients))
    return found


def budgets(entry: Entry, trial: Trial) -> list[float]:
    """Return s, or the values of s that the clients have in turn.

    Raises:
        InputError: the experiment has no sparsity for this method, or one that is none.
    """
    path = entry.run.path / "experiment.json"
    for method in entry.run.experiment["methods"]:
        if method["label"] == trial.label and method.get("sparsity") is not None:
            s = record(Sparsity, method, f"{path}: methods.{trial.label}").sparsity
            return [float(value) for value in (s if isinstance(s, Sequence) else [s])]
    raise InputError(f"{path} has no sparsity for {trial.label!r}")


def _even_positions(count: int) -> list[int]:
    """Return evenly spaced numbers below ``count``, with the first and the last one."""
    return sorted(set(np.linspace(0, count - 1, min(count, _MAX_HISTOGRAMS)).round().astype(int)))


def _draw_histograms(figure: Any, records: Sequence[Record]) -> None:
    panels = figure.subplots(1, len(records), sharex=True, sharey=True, squeeze=False)[0]
    nonzero = np.concatenate([gates[gates != 0] for _, gates, _, _ in records])
    low, high = (min(0.0, nonzero.min()), max(1.0, nonzero.max())) if len(nonzero) else (0.0, 1.0)
    edges = np.linspace(low, high, 41)
    for axis, (number, gates, _, _) in zip(panels, records, strict=True):
        counts, _ = np.histogram(gates[gates != 0], edges)
        axis.stairs(100 * counts / gates.size, edges, fill=True, color=COLOURS[0])
        dropped = 100 * (gates == 0).mean()
        axis.set_title(f"round {number}\n{dropped:.0f} % dropped")
    panels[0].set_ylim(bottom=0)
    panels[0].set_ylabel("share of all gates (%)")
    figure.supxlabel("gate of a kept block", fontsize="medium")


def _draw_dropped(axis: Any, records: Sequence[Record]) -> None:
    rounds = [number for number, *_ in records]
    by_client = [100 * (gates == 0).mean(axis=1) for _, gates, _, _ in records]
    _draw_line(axis, rounds, by_client, COLOURS[1], "")
    axis.set(title="dropped blocks", xlabel="round", ylabel="share of blocks (%)", ylim=(0, 100))


def _draw_sparsity(axis: Any, records: Sequence[Record], budgets: Sequence[float]) -> None:
    rounds = [number for number, *_ in records]
    for index, s in enumerate(distinct := sorted(set(budgets))):
        turns = [turn for turn, value in enumerate(budgets) if value == s]
        by_client = [
            sparsity[np.isin(clients % len(budgets), turns)] for _, _, sparsity, clients in records
        ]
        colour = COLOURS[index % len(COLOURS)]
        axis.axhline(s, color=colour, linestyle="--", linewidth=1.0)
        _draw_line(axis, rounds, by_client, colour, f"s = {s:g}")
    axis.set(title="parameters in kept blocks", xlabel="round")
    axis.set(ylabel="share of parameters", ylim=(0, min(1.0, 1.15 * distinct[-1])))
    axis.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))


def _draw_line(
    axis: Any, rounds: Sequence[int], values: Sequence[Floats], colour: str, label: str
) -> None:
    """Draw means over clients with the range from the 10th to the 90th percentile."""
    points = [(number, x) for number, x in zip(rounds, values, strict=True) if len(x)]
    if not points:
        return
    numbers = [number for number, _ in points]
    means = [x.mean() for _, x in points]
    low, high = zip(*(np.percentile(x, (10, 90)) for _, x in points), strict=True)
    axis.plot(numbers, means, color=colour, marker="o", markersize=3.5, label=label)
    axis.fill_between(numbers, low, high, color=colour, alpha=0.15, linewidth=0)
    axis.grid(visible=True)
    axis.xaxis.get_major_locator().set_params(integer=True)


def gates_by_round(entry: Entry) -> Drawing:
    """Draw histograms of all gates over rounds, the share of dropped blocks, and the sparsity."""
    trial = entry.trials[0]
    with_gates = [record for record in records(trial) if record[1].size]
    figure = new_figure(5.4)
    title = f"Gates of {entry.label}"
    if not with_gates:
        figure.text(0.5, 0.5, "no round is evaluated yet", ha="center", va="center")
        return Drawing(
            title, figure, "The run has no gates yet: they are recorded when a round is evaluated."
        )
    upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=[1.1, 1])[:, 0]
    _draw_histograms(upper, [with_gates[at] for at in _even_positions(len(with_gates))])
    left, right = lower.subplots(1, 2, sharex=True)
    _draw_dropped(left, with_gates)
    _draw_sparsity(right, with_gates, budgets(entry, trial))
    return Drawing(
        title,
        figure,
        f"The figure shows the gates that the gating layers of seed {trial.seed} compute for their "
        "clients' validation examples. The histograms above show the gates of kept blocks at some "
        "of the evaluated rounds, for all clients and blocks together; the rest up to 100 % are "
        "dropped blocks, whose gate is 0. Below, the left figure shows the share of dropped "
        "blocks, and the right one the share of the model's parameters in kept blocks (the "
        "sparsity), which may not exceed s (dashed). Lines are means over clients; bands reach "
        "from the 10th to the 90th percentile. If every example has its own gates, a client's "
        "gates are means over its examples.",
    )
