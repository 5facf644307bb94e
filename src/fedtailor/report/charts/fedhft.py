"""Charts of FedHFT: the rows that its clusters send."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ...store.read import Trial
from ..select import Entry
from .content import Group, Json, number
from .parts import Chart, Figure, line_chart, nominal
from .specs import chart, tip

_SENT = "server/sent."

Floats = NDArray[np.float64]


def _natural(name: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def short_names(paths: Sequence[str]) -> list[str]:
    """Drop the parts with which all paths begin or end, but leave one part that is no number."""
    parts = [path.split(".") for path in paths]
    while len({tuple(part[:1]) for part in parts}) == 1 and min(map(len, parts)) > 1:
        parts = [part[1:] for part in parts]
    while len({tuple(part[-1:]) for part in parts}) == 1 and not any(
        all(piece.isdigit() for piece in part[:-1]) for part in parts
    ):
        parts = [part[:-1] for part in parts]
    return [".".join(part) for part in parts]


def sent_rows(trial: Trial) -> list[tuple[int, dict[str, Floats]]]:
    """Return the evaluated rounds, and by layer the share of each cluster that sent each row,
    ``[C, d_out]``."""
    rounds = []
    for when, found in trial.diagnostics():
        paths = sorted((n.removeprefix(_SENT) for n in found if n.startswith(_SENT)), key=_natural)
        if not paths:
            raise InputError(f"{trial.folder}: the file of round {when} lacks {_SENT}*")
        rounds.append((when, {path: found[_SENT + path].astype(np.float64) for path in paths}))
    return rounds


def kept_rows(entries: Sequence[Entry], position: int, of: Sequence[Group]) -> Figure | None:
    """How many rows each cluster sends by round, and how far its clients agree on them by layer."""
    trial = entries[position].trials[0]
    by_round = sent_rows(trial)  # shares [C, d_out] by layer
    if not by_round or all((s == 1).all() for _, layers in by_round for s in layers.values()):
        return None
    sent, alike, cells = [], [], []
    for when, layers in by_round:
        names = short_names(list(layers))
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
    of_sent = line_chart("rows sent, mean over clients (%)", "cluster", nominal("cluster"))
    of_alike = line_chart("rows on which clients agree (%)", "cluster", nominal("cluster"))
    return Figure(
        f"Rows sent by {entries[position].label}",
        "Each client sends only those rows of its update that change the layer most. The first "
        "chart shows the share of rows that the clients of each cluster send, by round. The second "
        "one says how far they choose the same rows: the share of rows that at least nine tenths "
        "of a cluster's clients (by assignment and examples) send, or don't send. A cluster with "
        "one client always agrees. The map shows that by layer. The more clients agree, the more "
        f"of a cluster's update is a mean over all of them. All show seed {trial.seed}.",
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
