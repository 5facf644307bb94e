"""FedHFT's figures: the clusters that clients belong to, and the rows of the updates they send."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ..drawing import Drawing, new_figure
from ..read import Trial
from ..records import Partition
from ..select import Entry

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SENT = "server/sent."
_BANDS = 100  # lines of a map; each is a mean over neighbouring rows of a layer

Floats = NDArray[np.float64]


def _require(trial: Trial, number: int, tensors: dict[str, NDArray[Any]], *names: str) -> None:
    if missing := set(names) - tensors.keys():
        raise InputError(
            f"{trial.folder}: the file of round {number} lacks {', '.join(sorted(missing))}"
        )


def _history(trial: Trial) -> tuple[list[int], list[int], Floats]:
    """Return rounds, clients, and the assignments ``[rounds, n, C]``; empty if there are none."""
    rounds, clients, p = [], [], []
    for number, tensors in trial.diagnostics():
        _require(trial, number, tensors, "server/assignments", "server_clients")
        rounds.append(number)
        clients = tensors["server_clients"].tolist()
        p.append(tensors["server/assignments"].astype(np.float64))
    return rounds, clients, np.array(p)


def _by_group(clients: Sequence[int], last: Floats, partition: Partition) -> list[list[int]]:
    """Return the positions of the clients by true group, or else by their last cluster."""
    clusters = partition.clusters
    groups = (last.argmax(1) if clusters is None else clusters[list(clients)]).tolist()
    return [
        [position for position, of_client in enumerate(groups) if of_client == group]
        for group in sorted(set(groups))
    ]


def _draw_edges(axis: Axes, groups: Sequence[Sequence[int]]) -> None:
    ends = np.cumsum([len(group) for group in groups])
    for end in ends[:-1]:
        axis.axhline(end - 0.5, color="white", linewidth=1.5)


def assignments(entry: Entry) -> Drawing | None:
    """Draw assignment probabilities over rounds: a row of panels a seed, a panel a cluster.

    None if no round is evaluated yet, or if there is only one cluster.
    """
    histories = [(trial, *_history(trial)) for trial in entry.trials]
    histories = [history for history in histories if len(history[1]) and history[3].shape[2] > 1]
    if not histories:
        return None
    clusters = histories[0][3].shape[2]
    max_clients = max(len(clients) for _, _, clients, _ in histories)
    figure = new_figure(0.9 + len(histories) * min(5.5, 1.0 + 0.09 * max(max_clients, 14)))
    panels = figure.subplots(len(histories), clusters, squeeze=False, sharey="row")
    has_truth = False
    for row, (trial, rounds, clients, p) in zip(panels, histories, strict=True):
        partition = entry.run.partitions[trial.seed]
        has_truth = partition.clusters is not None
        groups = _by_group(clients, p[-1], partition)
        order = [position for group in groups for position in group]
        for c, axis in enumerate(row):
            image = axis.imshow(
                p[:, order, c].T, aspect="auto", interpolation="none", vmin=0, vmax=1
            )
            _draw_edges(axis, groups)
            step = 1 + (len(rounds) - 1) // 6
            axis.set_xticks(range(0, len(rounds), step), rounds[::step])
            seed = f", seed {trial.seed}" if len(histories) > 1 else ""
            axis.set_title(f"cluster {c}{seed}")
            axis.set_xlabel("round")
        centres = np.cumsum([len(group) for group in groups]) - [(len(g) + 1) / 2 for g in groups]
        word = "group" if has_truth else "ends in"
        row[0].set_yticks(centres, [f"{word} {c}\n({len(g)})" for c, g in enumerate(groups)])
    figure.colorbar(image, ax=panels.ravel().tolist(), label="assignment", aspect=30)
    order_words = "true group" if has_truth else "last cluster"
    return Drawing(
        f"Assignments of {entry.label}",
        figure,
        "The colour says how much each client (line) belongs to each cluster (panel) after the "
        "evaluated rounds, from 0 to 1; the values of a client sum to 1 over the panels. Clients "
        f"are ordered by their {order_words}, and the number in brackets is its size. During the "
        "warm-up, and until a client takes part for the first time after it, its values are "
        f"{1 / clusters:.2f}.",
    )


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


def _bands(shares: Floats) -> Floats:
    """Turn shares by row ``[d_out]`` into `_BANDS` numbers, sorted from the rows sent most."""
    ordered = np.sort(shares)[::-1]
    return np.interp(np.linspace(0, len(ordered) - 1, _BANDS), np.arange(len(ordered)), ordered)


def sent_rows(trial: Trial) -> list[tuple[int, dict[str, Floats]]]:
    """Return the evaluated rounds, and by layer the share of each cluster that sent each row,
    ``[C, d_out]``."""
    rounds = []
    for number, tensors in trial.diagnostics():
        paths = sorted(
            (n.removeprefix(_SENT) for n in tensors if n.startswith(_SENT)), key=_natural
        )
        _require(trial, number, tensors, *([] if paths else [f"{_SENT}*"]))
        rounds.append((number, {path: tensors[_SENT + path].astype(np.float64) for path in paths}))
    return rounds


def kept_rows(entry: Entry) -> Drawing | None:
    """Draw the share of each cluster that sent each row of each layer in the last evaluated round.

    None if no round is evaluated yet, or if all clients sent all rows.
    """
    last_rounds = []
    for trial in entry.trials:
        if rounds := sent_rows(trial):
            number, layers = rounds[-1]
            last_rounds.append((trial, number, list(layers), list(layers.values())))
    if all((share == 1).all() for _, _, _, shares in last_rounds for share in shares):
        return None
    clusters = len(last_rounds[0][3][0])
    figure = new_figure(1.3 + 2.3 * len(last_rounds))
    panels = figure.subplots(len(last_rounds), clusters, squeeze=False, sharey=True)
    for row, (trial, number, paths, shares) in zip(panels, last_rounds, strict=True):
        for c, axis in enumerate(row):
            bands = np.stack([_bands(share[c]) for share in shares], 1)  # [bands, layers]
            image = axis.imshow(bands, aspect="auto", interpolation="none", vmin=0, vmax=1)
            axis.set_yticks(np.linspace(-0.5, _BANDS - 0.5, 5), ["0", "25", "50", "75", "100"])
            axis.set_xticks(range(len(paths)), short_names(paths), rotation=90, fontsize=7)
            seed = f", seed {trial.seed}" if len(last_rounds) > 1 else ""
            axis.set_title(f"cluster {c}{seed}, round {number}" if c == 0 else f"cluster {c}")
        row[0].set_ylabel("rows of a layer (%),\nmost sent first")
    figure.colorbar(image, ax=panels.ravel().tolist(), label="share that sent it", aspect=20)
    return Drawing(
        f"Rows sent by {entry.label}",
        figure,
        "The colour gives, for every adapted layer, the share of a cluster's clients (by "
        "assignment and examples) that sent each output row of their update in the last evaluated "
        "round. Rows are sorted within each column. A sharp edge means that the clients agree on "
        "the rows that matter; steps mean that each client sends other rows. A row with share 0 "
        "was sent by no client, and stays as it was.",
    )
