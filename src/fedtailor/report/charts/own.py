"""Live charts of single methods, beside their maps: what they show, and their specifications.

Each stands for a drawing of ``report/methods``, which the page shows without scripts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..differences import division_of
from ..methods import fedhft, fedsq, pfedgate
from ..select import Entry, metric_of, unit_of
from .content import Group, Json, number
from .specs import best_so_far, chart, tip

Rows = Iterable[Mapping[str, Any]]
_BINS = 40
_LEFT = {
    "minExtent": 96,
    "maxExtent": 96,
    "labelLimit": 72,
}  # charts that stand one above the other


@dataclass(frozen=True)
class Chart:
    """A specification, and its rows by data set."""

    spec: Json
    rows: Mapping[str, Rows]


@dataclass(frozen=True)
class Figure:
    """Charts of one method. With ``rounds`` a slider chooses one of them, and rows of the data set
    ``chosen`` are those of that round."""

    caption: str
    charts: Sequence[Chart]
    rounds: Sequence[int] = ()
    is_stacked: bool = False  # one chart above the other, instead of side by side


def own_figures(entries: Sequence[Entry], of: Sequence[Group]) -> list[Json]:
    """Return what the page needs of each live figure, with its method's position and the name of
    the drawing for which it stands."""
    found = []
    for position, entry in enumerate(entries):
        for draw, build in _FIGURES.get(entry.method, {}).items():
            figure = build(entries, position, of)
            if figure is None:
                continue
            charts = [
                {
                    "name": f"own-{position}-{draw}-{k}",
                    "spec": one.spec,
                    "data": {name: _by_column(rows) for name, rows in one.rows.items()},
                }
                for k, one in enumerate(figure.charts)
            ]
            found.append(
                {
                    "method": position,
                    "drawing": draw,
                    "caption": figure.caption,
                    "rounds": list(figure.rounds),
                    "isStacked": figure.is_stacked,
                    "charts": charts,
                }
            )
    return found


def _by_column(rows: Rows) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return columns


def _lines(
    title: str, series: str, colour: Json, tooltip: Sequence[tuple[str, str, str]] = (),
    *, least: float | None = 0,
) -> Json:  # fmt: skip
    """Lines by round: rows have ``round``, ``series`` and ``value``, and ``low`` and ``high`` of a
    band where they are known.

    The axis reaches from ``least`` to 100, or as far as the values if that is None.
    """
    x = {"field": "round", "type": "quantitative",
         "axis": {"title": "round", "tickMinStep": 1, "format": "d", "grid": False}}  # fmt: skip
    y = {"field": "value", "type": "quantitative", "axis": {"title": title},
         "scale": {"zero": False} if least is None else {"domain": [least, 100]}}  # fmt: skip
    words = [("series", "n", series), ("round", "q", "round"), ("value", "q", title), *tooltip]
    of_series: Json = {"x": x, "y": y, "color": colour, "detail": {"field": "series"}}
    area = of_series | {"y": y | {"field": "low"}, "y2": {"field": "high"}}
    layers = [
        {"mark": {"type": "line", "strokeWidth": 2}, "encoding": of_series},
        {"mark": {"type": "circle", "size": 36, "opacity": 1}, "encoding": of_series},
        {
            "transform": [{"filter": "isValid(datum.low)"}],
            "mark": {"type": "area", "opacity": 0.15},
            "encoding": area,
        },
        {
            "mark": {"type": "circle", "size": 160, "opacity": 0.001},
            "encoding": {"x": x, "y": y, "tooltip": tip(*words)},
        },
    ]
    return chart("lines", f"{title} by round", 260, {"layer": layers})


def _nominal(title: str | None) -> Json:
    legend = {"orient": "top", "title": title, "symbolType": "circle", "symbolOpacity": 1}
    legend |= {"labelLimit": 260} | ({} if title else {"columns": 1})
    return {"field": "series", "type": "nominal", "sort": None, "legend": legend}


def _spread(series: str, when: int, x: NDArray[np.float64]) -> Json:
    """The mean and the 10th and 90th percentile of ``x``."""
    low, high = np.percentile(x, (10, 90)).tolist()
    values = {"value": number(float(x.mean())), "low": number(low), "high": number(high)}
    return {"series": series, "round": when, **values}


# ---- pFedGate ----


def _gating_layers(entries: Sequence[Entry], position: int, of: Sequence[Group]) -> Figure | None:
    """The tree of the clients' gating layers above the labels of the same clients."""
    entry = entries[position]
    trial = entry.trials[0]
    of_trial = division_of(entry.run, trial.seed)
    place = next(k for k, group in enumerate(of) if group.division == of_trial)
    tree = pfedgate.gating_tree(entry)
    order = tree.clients
    if len(order) < 2:
        return None
    partition = of[place].partition
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


def _gates(entries: Sequence[Entry], position: int, of: Sequence[Group]) -> Figure | None:
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
    bars, lines = [], []
    budgets = pfedgate.budgets(entry, trial)
    for when, gates, sparsity, clients in records:
        counts, _ = np.histogram(gates[gates != 0], edges)
        bars += [
            {"round": when, "from": number(float(a)), "to": number(float(b)),
             "share": number(100 * float(count) / gates.size)}
            for a, b, count in zip(edges[:-1], edges[1:], counts, strict=True)
            if count
        ]  # fmt: skip
        lines.append(_spread("blocks left out", when, 100 * (gates == 0).mean(axis=1)))
        for s in sorted(set(budgets)):
            turns = [turn for turn, value in enumerate(budgets) if value == s]
            kept = sparsity[np.isin(clients % len(budgets), turns)]
            if len(kept):
                series = f"parameters kept (at most {100 * s:.3g} %)"
                lines.append(_spread(series, when, 100 * kept))
    words = [("low", "q", "lowest tenth of clients up to"), ("high", "q", "highest tenth from")]
    by_round = _lines("share (%)", "share of", _nominal(None), words)
    return Figure(
        "A gating layer gives each block of the model's parameters a gate. Blocks with gate 0 are "
        "left out; others are multiplied by their gate. The first chart shows the gates of the "
        "blocks that are kept after a round, over all clients and blocks; what is missing to "
        "100 % are blocks that are left out. The second one shows, by round, the share of blocks "
        "that are left out, and the share of the model's parameters in the blocks that are kept. "
        "The setting sparsity says how large that may be. Lines are means over clients, and bands "
        "leave out the lowest and the highest tenth. Gates are those for the clients' validation "
        f"examples, with seed {trial.seed}.",
        [Chart(_histogram(bars, low, high), {"chosen": bars}), Chart(by_round, {"lines": lines})],
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


# ---- FedHFT ----


def _sent_rows(entries: Sequence[Entry], position: int, of: Sequence[Group]) -> Figure | None:
    """How many rows each cluster sends by round, and how far its clients agree on them by layer."""
    trial = entries[position].trials[0]
    by_round = fedhft.sent_rows(trial)  # shares [C, d_out] by layer
    if not by_round or all((s == 1).all() for _, layers in by_round for s in layers.values()):
        return None
    sent, alike, cells = [], [], []
    for when, layers in by_round:
        names = fedhft.short_names(list(layers))
        for c in range(len(next(iter(layers.values())))):
            shares = np.concatenate([share[c] for share in layers.values()])
            if not shares.any():
                continue  # nobody of the cluster took part
            agreed = 100 * ((shares <= 0.1) | (shares >= 0.9)).mean()
            of_cluster = {"series": str(c), "round": when}
            sent.append(of_cluster | {"value": number(100 * float(shares.mean()))})
            alike.append(of_cluster | {"value": number(float(agreed))})
            cells += [
                {"round": when, "cluster": c, "layer": name, "sent": number(100 * share[c].mean()),
                 "agreed": number(100 * ((share[c] <= 0.1) | (share[c] >= 0.9)).mean())}
                for name, share in zip(names, layers.values(), strict=True)
            ]  # fmt: skip
    of_sent = _lines("rows sent, mean over clients (%)", "cluster", _nominal("cluster"))
    of_alike = _lines("rows on which clients agree (%)", "cluster", _nominal("cluster"))
    return Figure(
        "Each client sends only those rows of its update that change the layer most. The first "
        "chart shows the share of rows that the clients of each cluster send, by round. The second "
        "one says how far they choose the same rows: the share of rows that at least nine tenths "
        "of a cluster's clients (by assignment and examples) send, or don't send. The map shows "
        "that by layer. The more clients agree, the more of a cluster's update is a mean over all "
        f"of them. All show seed {trial.seed}.",
        [
            Chart(of_sent, {"lines": sent}),
            Chart(of_alike, {"lines": alike}),
            Chart(_agreement(), {"chosen": cells}),
        ],
        [when for when, _ in by_round],
    )


def _agreement() -> Json:
    words = tip(
        ("cluster", "n", "cluster"), ("layer", "n", "layer"), ("round", "q", "after round"),
        ("agreed", "q", "clients agree on (% of rows)"), ("sent", "q", "sent (% of rows)"),
    )  # fmt: skip
    axis = {"ticks": False, "domain": False, "grid": False}
    encoding = {
        "x": {"field": "cluster", "type": "ordinal",
              "axis": {"title": "cluster", "labelAngle": 0, **axis}},
        "y": {"field": "layer", "type": "ordinal", "sort": None,
              "axis": {"title": None, "labelLimit": 130, "labelOverlap": True, **axis}},
        "color": {"field": "agreed", "type": "quantitative", "scale": {"domain": [0, 100]},
                  "legend": {"orient": "top", "gradientLength": 160, "titleLimit": 300,
                             "title": "rows on which clients agree (%)"}},
        "tooltip": words,
    }  # fmt: skip
    return chart("chosen", "agreement on the rows that are sent, by layer and cluster",
                 {"step": 16}, {"mark": "rect", "encoding": encoding})  # fmt: skip


# ---- FedSQ ----


def _rounds_to_best(entries: Sequence[Entry], position: int, of: Sequence[Group]) -> Figure | None:
    """The best validation result so far, of all methods of the run."""
    entry = entries[position]
    metric = metric_of([entry.run])
    rows = []
    for place, other in enumerate(entries):
        if other.run.path != entry.run.path:
            continue
        for trial in other.trials:
            rounds, best = fedsq.best_so_far(trial, metric)
            first = int(np.argmax(best == best[-1])) if rounds else 0
            rows += [
                {"method": place, "seed": trial.seed, "round": when, "value": number(float(value)),
                 "isBest": k == first}
                for k, (when, value) in enumerate(zip(rounds, best.tolist(), strict=True))
            ]  # fmt: skip
    if not rows:
        return None
    title = f"best mean validation {metric} so far{unit_of(metric)}"
    labels = [one.label for one in entries]
    return Figure(
        f"The best mean validation {metric} over clients that each method has reached by a round, "
        "a line for each seed. The marker is the first round with the best value of the whole run: "
        "the further left, the fewer rounds the method needs.",
        [Chart(best_so_far(labels, entry.label, title), {"lines": rows})],
    )


def _by_activation(entries: Sequence[Entry], position: int, of: Sequence[Group]) -> Figure | None:
    """The agreement of each activation by round, over clients and seeds."""
    curves = fedsq.agreement(entries[position].trials)
    if not curves:
        return None
    rows = [
        {"series": k, "round": when, "value": number(100 * value)}
        for when, values in sorted(
            ({0: np.ones_like(next(iter(curves.values())))} | curves).items()
        )
        for k, value in enumerate(values.tolist())
    ]
    colour = {
        "field": "series", "type": "quantitative",
        "scale": {"scheme": {"name": "viridis", "extent": [0.25, 0.85]}},
        "legend": {"orient": "top", "title": "activation, from the input up", "tickMinStep": 1,
                   "gradientLength": 160, "format": "d"},
    }  # fmt: skip
    spec = _lines("units in agreement, mean over clients (%)", "activation", colour, least=None)
    return Figure("By round, from 100 % at the start.", [Chart(spec, {"lines": rows})])


_Build = Callable[[Sequence[Entry], int, Sequence[Group]], Figure | None]
_FIGURES: Mapping[str, Mapping[str, _Build]] = {  # by method and name of the drawing
    "pfedgate": {"clustering": _gating_layers, "gates_by_round": _gates},
    "fedhft": {"kept_rows": _sent_rows},
    "fedsq": {"rounds_to_best": _rounds_to_best, "mask_agreement": _by_activation},
}
