"""Charts of pFedGate: the tree of its gating layers, and its gates by round."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ...store.checked import record
from ...store.read import Trial
from ...store.records import Counts, Partition, Sparsity
from ...store.tensors import tensor_names, tensors
from ..differences import division_of
from ..select import Entry
from .content import Group, Json, number
from .parts import Chart, Figure, line_chart, nominal, spread
from .specs import chart, layer, picked, tip

Floats = NDArray[np.float64]
Bracket = tuple[list[float], list[float]]  # x and y of one merge of two clusters
Record = tuple[int, Floats, Floats, NDArray[np.int64]]  # round, gates, sparsity, clients
_BINS = 40
_LAYER = ("gate.norm.", "gate.linear.", "gate.post.")
_STATISTICS = ("running_mean", "running_var")
_MAX_SORTED = 300  # clients; the leaves of a dendrogram with more of them have any valid order
_LEFT = {"minExtent": 96, "maxExtent": 96, "labelLimit": 72}  # of charts one above the other


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


def _lie_at_sites(trial: Trial) -> bool:
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


def gating_layers(entries: Sequence[Entry], position: int, of: Sequence[Group]) -> Figure | None:
    """The tree of the clients' gating layers above the labels of the same clients."""
    entry = entries[position]
    trial = entry.trials[0]
    if _lie_at_sites(trial):
        return None
    of_trial = division_of(entry.run, trial.seed)
    place = next(k for k, group in enumerate(of) if group.division == of_trial)
    partition = of[place].partition
    tree = gating_tree(trial, partition)
    order = tree.clients
    if len(order) < 2:
        return None
    shown = of[place].positions(order)
    joins = [
        {"join": k, "x": x, "y": number(y)}
        for k, (xs, ys) in enumerate(tree.brackets)
        for x, y in zip(xs, ys, strict=True)
    ]
    tops = [
        {"left": xs[1], "right": xs[2], "y": number(ys[1]), "clients": size}
        for (xs, ys), size in zip(tree.brackets, tree.sizes, strict=True)
    ]
    keys = [f"{place}:{shown[client]}" if client in shown else "" for client in order]
    names = [partition.name(client) for client in order]
    train = [int(partition.train[client]) for client in order]
    leaves = [
        {"x": k, "key": key, "name": name, "train": size}
        for k, (key, name, size) in enumerate(zip(keys, names, train, strict=True))
    ]
    charts = [Chart(_dendrogram(names, tree.low), {"joins": joins, "tops": tops, "leaves": leaves})]
    caption = tree.caption
    if tree.shares is not None:
        cells = [
            {"left": k - 0.5, "right": k + 0.5, "class": partition.classes[c], "key": keys[k],
             "name": names[k], "share": number(100 * share, 3)}
            for k, shares in enumerate(tree.shares.tolist())
            for c, share in enumerate(shares)
            if share
        ]  # fmt: skip
        charts.append(Chart(_strip(len(order), partition.classes), {"cells": cells}))
    return Figure(f"Gating layers of {entry.label}", caption, charts, is_stacked=True)


def _along_clients(count: int, names: Sequence[str] = ()) -> Json:
    axis: Json = {"title": None, "labels": False, "ticks": False, "grid": False, "domain": False}
    if names and count <= 40:
        axis = {"title": "client", "values": list(range(count)), "grid": False, "labelPadding": 8}
        axis |= {"labelAngle": -60} if max(map(len, names)) > 3 else {}
        axis |= {"labelExpr": f"{json.dumps(names)}[datum.value]", "labelLimit": 110}
        axis |= {"labelOverlap": True, "ticks": False, "domain": False}
    elif names:
        axis["title"] = f"{count} clients"
    scale = {"domain": [-0.5, count - 0.5], "nice": False, "zero": False}
    return {"type": "quantitative", "axis": axis, "scale": scale}


def _dendrogram(names: Sequence[str], low: float) -> Json:
    x = _along_clients(len(names), names)
    y: Json = {"field": "y", "type": "quantitative", "axis": {"title": "distance", **_LEFT},
               "scale": {"domainMin": low, "zero": False}}  # fmt: skip
    ends = {"x": {"field": "left", **x}, "x2": {"field": "right"}, "y": y}
    joined = tip(("y", "q", "joined at distance"), ("clients", "q", "clients below"))
    leaf = {"x": {"field": "x", **x}, "y": {**y, "datum": low}}
    leaf["y"].pop("field")
    words = tip(("name", "n", "client"), ("train", "q", "training examples"))
    layers = [
        layer({"type": "line", "strokeWidth": 1.6, "clip": True},
              {"x": {"field": "x", **x}, "y": y, "detail": {"field": "join"},
               "order": {"value": None}}, data="joins"),
        layer({"type": "rule", "strokeWidth": 14, "opacity": 0.001}, ends | {"tooltip": joined},
              data="tops"),
        layer({"type": "circle", "size": 70, "opacity": 1, "cursor": "pointer"},
              leaf | {"tooltip": words}, data="leaves"),
        picked("point", leaf, data="leaves", filled=False, size=220, strokeWidth=2.5),
    ]  # fmt: skip
    title = "clients joined by the distance of their gating layers"
    return chart("joins", title, 240, {"layer": layers})


def _strip(count: int, classes: Sequence[str]) -> Json:
    x = _along_clients(count)
    y = {"field": "class", "type": "ordinal", "scale": {"domain": list(classes)},
         "axis": {"title": "class", "ticks": False, "domain": False, **_LEFT}}  # fmt: skip
    words = tip(
        ("name", "n", "client"), ("class", "n", "class"), ("share", "q", "% of its examples")
    )
    legend = {"orient": "top", "gradientLength": 160, "title": "% of the client's examples"}
    places = {"x": {"field": "left", **x}, "x2": {"field": "right"}, "y": y}
    colour = {"field": "share", "type": "quantitative", "legend": legend,
              "scale": {"domain": [0, 100]}}  # fmt: skip
    rect = layer({"type": "rect", "cursor": "pointer"},
                 {**places, "color": colour, "tooltip": words})  # fmt: skip
    layers = [rect, picked("rect", places, fill=None, strokeWidth=1.5)]
    height = {"step": 16 if len(classes) <= 30 else 6}
    return chart("cells", "labels of the same clients", height, {"layer": layers})


def _records(trial: Trial) -> list[Record]:
    """Read the gates ``[n, L]``, the sparsity ``[n]`` and the clients ``[n]`` of evaluated rounds.

    Raises:
        InputError: a round's file lacks one of them.
    """
    needed = ("client/gates", "client/sparsity", "clients")
    found = []
    for when, content in trial.diagnostics():
        if missing := [name for name in needed if name not in content]:
            raise InputError(f"{trial.folder}: the file of round {when} lacks {', '.join(missing)}")
        gates, sparsity, clients = (content[name] for name in needed)
        found.append((when, gates.astype(np.float64), sparsity.astype(np.float64), clients))
    return found


def _budgets(entry: Entry, trial: Trial) -> list[float]:
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


def gates_by_round(entries: Sequence[Entry], position: int, of: Sequence[Group]) -> Figure | None:
    """A histogram of gates, the blocks that are left out, and the parameters that are kept."""
    entry = entries[position]
    trial = entry.trials[0]
    records = [record for record in _records(trial) if record[1].size]
    if not records:
        return None
    nonzero = np.concatenate([gates[gates != 0] for _, gates, _, _ in records])
    high = float(max(1.0, nonzero.max())) if len(nonzero) else 1.0
    low = float(min(0.0, nonzero.min())) if len(nonzero) else 0.0
    edges = np.linspace(low, high, _BINS + 1)
    bars, curves = [], []
    budgets = _budgets(entry, trial)
    for when, gates, sparsity, clients in records:
        counts, _ = np.histogram(gates[gates != 0], edges)
        bars += [
            {"round": when, "from": number(float(a)), "to": number(float(b)),
             "share": number(100 * float(count) / gates.size)}
            for a, b, count in zip(edges[:-1], edges[1:], counts, strict=True)
            if count
        ]  # fmt: skip
        curves.append(spread("blocks left out", when, 100 * (gates == 0).mean(axis=1)))
        for s in sorted(set(budgets)):
            turns = [turn for turn, value in enumerate(budgets) if value == s]
            kept = sparsity[np.isin(clients % len(budgets), turns)]
            if len(kept):
                series = f"parameters kept (at most {100 * s:.3g} %)"
                curves.append(spread(series, when, 100 * kept))
    words = [("low", "q", "lowest tenth of clients up to"), ("high", "q", "highest tenth from")]
    by_round = line_chart("share (%)", "share of", nominal(None), words)
    return Figure(
        f"Gates of {entry.label}",
        "A gating layer gives each block of the model's parameters a gate. Blocks with gate 0 are "
        "left out; others are multiplied by their gate. The first chart shows the gates of the "
        "blocks that are kept after a round, over all clients and blocks; what is missing to "
        "100 % are blocks that are left out. The second one shows, by round, the share of blocks "
        "that are left out, and the share of the model's parameters in the blocks that are kept. "
        "The setting sparsity says how large that may be. Lines are means over clients, and bands "
        "leave out the lowest and the highest tenth. Gates are those for the clients' validation "
        f"examples, with seed {trial.seed}.",
        [Chart(_histogram(bars, low, high), {"chosen": bars}), Chart(by_round, {"lines": curves})],
        [when for when, *_ in records],
    )


def _histogram(bars: Sequence[Json], low: float, high: float) -> Json:
    highest = max((bar["share"] for bar in bars), default=1.0)
    words = tip(("from", "q", "gate from"), ("to", "q", "to"), ("share", "q", "% of all gates"),
                ("round", "q", "after round"))  # fmt: skip
    encoding = {
        "x": {"field": "from", "type": "quantitative", "axis": {"title": "gate of a kept block"},
              "scale": {"domain": [low, high], "zero": False}},
        "x2": {"field": "to"},
        "y": {"field": "share", "type": "quantitative", "scale": {"domain": [0, highest]},
              "axis": {"title": "share of all gates (%)"}},
        "y2": {"datum": 0},
        "tooltip": words,
    }  # fmt: skip
    mark = {"type": "bar", "binSpacing": 1}
    return chart("chosen", "gates of kept blocks", 260, {"mark": mark, "encoding": encoding})
