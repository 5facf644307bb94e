"""Live charts of pFedGate: the tree of its gating layers, and its gates by round."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from ..differences import division_of
from ..methods import pfedgate
from ..select import Entry
from .content import Group, Json, number
from .parts import Chart, Figure, line_chart, nominal, spread
from .specs import chart, tip

_BINS = 40
_LEFT = {
    "minExtent": 96,
    "maxExtent": 96,
    "labelLimit": 72,
}  # charts that stand one above the other


def gating_layers(entries: Sequence[Entry], position: int, of: Sequence[Group]) -> Figure | None:
    """The tree of the clients' gating layers above the labels of the same clients."""
    entry = entries[position]
    trial = entry.trials[0]
    if pfedgate.lie_at_sites(trial):
        return None
    of_trial = division_of(entry.run, trial.seed)
    place = next(k for k, group in enumerate(of) if group.division == of_trial)
    partition = of[place].partition
    tree = pfedgate.gating_tree(trial, partition)
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
    charts = [Chart(_tree(names, tree.low), {"joins": joins, "tops": tops, "leaves": leaves})]
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
    return Figure(caption, charts, is_stacked=True)


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


def _tree(names: Sequence[str], low: float) -> Json:
    x = _along_clients(len(names), names)
    y: Json = {"field": "y", "type": "quantitative", "axis": {"title": "distance", **_LEFT},
               "scale": {"domainMin": low, "zero": False}}  # fmt: skip
    join = {
        "data": {"name": "joins"},
        "mark": {"type": "line", "strokeWidth": 1.6, "clip": True},
        "encoding": {
            "x": {"field": "x", **x}, "y": y, "detail": {"field": "join"}, "order": {"value": None}
        },
    }  # fmt: skip
    touch = {
        "data": {"name": "tops"},
        "mark": {"type": "rule", "strokeWidth": 14, "opacity": 0.001},
        "encoding": {
            "x": {"field": "left", **x}, "x2": {"field": "right"}, "y": y,
            "tooltip": tip(("y", "q", "joined at distance"), ("clients", "q", "clients below")),
        },
    }  # fmt: skip
    words = tip(("name", "n", "client"), ("train", "q", "training examples"))
    places = {"x": {"field": "x", **x}, "y": y | {"field": None, "datum": low}}
    places["y"].pop("field")
    leaf = {
        "data": {"name": "leaves"},
        "mark": {"type": "circle", "size": 70, "opacity": 1, "cursor": "pointer"},
        "encoding": {**places, "tooltip": words},
    }
    picked = {
        "data": {"name": "leaves"},
        "transform": [{"filter": "picked != null && datum.key == picked"}],
        "mark": {"type": "point", "filled": False, "size": 220, "strokeWidth": 2.5},
        "encoding": places,
    }
    layers = {"layer": [join, touch, leaf, picked]}
    return chart("joins", "clients joined by the distance of their gating layers", 240, layers)


def _strip(count: int, classes: Sequence[str]) -> Json:
    x = _along_clients(count)
    y = {"field": "class", "type": "ordinal", "scale": {"domain": list(classes)},
         "axis": {"title": "class", "ticks": False, "domain": False, **_LEFT}}  # fmt: skip
    words = tip(
        ("name", "n", "client"), ("class", "n", "class"), ("share", "q", "% of its examples")
    )
    legend = {"orient": "top", "gradientLength": 160, "title": "% of the client's examples"}
    places = {"x": {"field": "left", **x}, "x2": {"field": "right"}, "y": y}
    rect = {
        "mark": {"type": "rect", "cursor": "pointer"},
        "encoding": {
            **places,
            "color": {"field": "share", "type": "quantitative", "legend": legend,
                      "scale": {"domain": [0, 100]}},
            "tooltip": words,
        },
    }  # fmt: skip
    picked = {
        "transform": [{"filter": "picked != null && datum.key == picked"}],
        "mark": {"type": "rect", "fill": None, "strokeWidth": 1.5},
        "encoding": places,
    }
    height = {"step": 16 if len(classes) <= 30 else 6}
    return chart("cells", "labels of the same clients", height, {"layer": [rect, picked]})


def gates_by_round(entries: Sequence[Entry], position: int, of: Sequence[Group]) -> Figure | None:
    """A histogram of gates, the blocks that are left out, and the parameters that are kept."""
    entry = entries[position]
    trial = entry.trials[0]
    records = [record for record in pfedgate.records(trial) if record[1].size]
    if not records:
        return None
    nonzero = np.concatenate([gates[gates != 0] for _, gates, _, _ in records])
    high = float(max(1.0, nonzero.max())) if len(nonzero) else 1.0
    low = float(min(0.0, nonzero.min())) if len(nonzero) else 0.0
    edges = np.linspace(low, high, _BINS + 1)
    bars, curves = [], []
    budgets = pfedgate.budgets(entry, trial)
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
