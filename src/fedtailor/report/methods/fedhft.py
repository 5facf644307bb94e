"""What FedHFT finds out: who belongs to which cluster, and which rows of the updates are sent."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ..drawing import Drawing, new_figure
from ..read import Partition, Trial
from ..select import Entry

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SENT = "server/sent."
_BANDS = 100  # that a layer's rows, most sent first, are summed up in

Floats = NDArray[np.float64]


def _need(trial: Trial, number: int, found: dict[str, NDArray[Any]], *names: str) -> None:
    if absent := set(names) - found.keys():
        raise InputError(
            f"{trial.folder}: what is observed in round {number} lacks {', '.join(sorted(absent))}"
        )


def _history(trial: Trial) -> tuple[list[int], list[int], Floats]:
    """Rounds, clients, and the assignments ``[rounds, n, C]``; all empty if there are none yet."""
    rounds, clients, p = [], [], []
    for number, found in trial.observed():
        _need(trial, number, found, "server/assignments", "server_clients")
        rounds.append(number)
        clients = found["server_clients"].tolist()
        p.append(found["server/assignments"].astype(np.float64))
    return rounds, clients, np.array(p)


def _by_group(clients: Sequence[int], last: Floats, partition: Partition) -> list[list[int]]:
    """Positions of the clients by true group, or else by the cluster they end in."""
    groups = partition.clusters
    main = (last.argmax(1) if groups is None else groups[list(clients)]).tolist()
    return [[at for at, of in enumerate(main) if of == group] for group in sorted(set(main))]


def _edges(axis: Axes, groups: Sequence[Sequence[int]]) -> None:
    ends = np.cumsum([len(group) for group in groups])
    for end in ends[:-1]:
        axis.axhline(end - 0.5, color="white", linewidth=1.5)


def assignments(entry: Entry) -> Drawing | None:
    """Assignment probabilities over rounds: a row of panels a seed, a panel a cluster."""
    shown = [(trial, *_history(trial)) for trial in entry.trials]
    shown = [row for row in shown if len(row[1]) and row[3].shape[2] > 1]
    if not shown:
        return None
    clusters = shown[0][3].shape[2]
    most = max(len(clients) for _, _, clients, _ in shown)
    figure = new_figure(0.9 + len(shown) * min(5.5, 1.0 + 0.09 * max(most, 14)))
    panels = figure.subplots(len(shown), clusters, squeeze=False, sharey="row")
    true_groups = False
    for row, (trial, rounds, clients, p) in zip(panels, shown, strict=True):
        partition = entry.run.partitions[trial.seed]
        true_groups = partition.clusters is not None
        groups = _by_group(clients, p[-1], partition)
        order = [at for group in groups for at in group]
        for c, axis in enumerate(row):
            image = axis.imshow(
                p[:, order, c].T, aspect="auto", interpolation="none", vmin=0, vmax=1
            )
            _edges(axis, groups)
            step = 1 + (len(rounds) - 1) // 6
            axis.set_xticks(range(0, len(rounds), step), rounds[::step])
            axis.set_title(f"cluster {c}" + (f", seed {trial.seed}" if len(shown) > 1 else ""))
            axis.set_xlabel("round")
        centres = np.cumsum([len(group) for group in groups]) - [(len(g) + 1) / 2 for g in groups]
        word = "group" if true_groups else "ends in"
        row[0].set_yticks(centres, [f"{word} {at}\n({len(g)})" for at, g in enumerate(groups)])
    figure.colorbar(image, ax=panels.ravel().tolist(), label="assignment", aspect=30)
    ordered = "the groups that the data were dealt to" if true_groups else "their last cluster"
    return Drawing(
        f"Assignments of {entry.label}",
        figure,
        "How far each client (a line) belongs to each cluster (a panel) after the evaluated "
        "rounds, from 0 to 1; a client's values sum to 1 over the panels. Clients are ordered by "
        f"{ordered}; in brackets, how many there are. During the warm-up, and until a client first "
        f"takes part after it, all are {1 / clusters:.2f}.",
    )


def _natural(name: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _short(paths: Sequence[str]) -> list[str]:
    """The paths without what all of them begin or end with, down to one part that is no number."""
    parts = [path.split(".") for path in paths]
    while len({tuple(part[:1]) for part in parts}) == 1 and min(map(len, parts)) > 1:
        parts = [part[1:] for part in parts]
    while len({tuple(part[-1:]) for part in parts}) == 1 and not any(
        all(piece.isdigit() for piece in part[:-1]) for part in parts
    ):
        parts = [part[:-1] for part in parts]
    return [".".join(part) for part in parts]


def _bands(shares: Floats) -> Floats:
    """Shares by row ``[d_out]``, sorted from the most sent, as means of `_BANDS` bands."""
    ordered = np.sort(shares)[::-1]
    return np.interp(np.linspace(0, len(ordered) - 1, _BANDS), np.arange(len(ordered)), ordered)


def kept_rows(entry: Entry) -> Drawing | None:
    """Which share of each cluster sent each row of each layer in the last evaluated round."""
    shown = []
    for trial in entry.trials:
        if seen := trial.observed():
            number, found = seen[-1]
            paths = sorted(
                (n.removeprefix(_SENT) for n in found if n.startswith(_SENT)), key=_natural
            )
            _need(trial, number, found, *([] if paths else [f"{_SENT}*"]))
            shares = [found[_SENT + path].astype(np.float64) for path in paths]  # [C, d_out] each
            shown.append((trial, number, paths, shares))
    if not shown or all((share == 1).all() for _, _, _, shares in shown for share in shares):
        return None
    clusters = len(shown[0][3][0])
    figure = new_figure(1.3 + 2.3 * len(shown))
    panels = figure.subplots(len(shown), clusters, squeeze=False, sharey=True)
    for row, (trial, number, paths, shares) in zip(panels, shown, strict=True):
        for c, axis in enumerate(row):
            map_ = np.stack([_bands(share[c]) for share in shares], 1)  # [bands, layers]
            image = axis.imshow(map_, aspect="auto", interpolation="none", vmin=0, vmax=1)
            axis.set_yticks(np.linspace(-0.5, _BANDS - 0.5, 5), ["0", "25", "50", "75", "100"])
            axis.set_xticks(range(len(paths)), _short(paths), rotation=90, fontsize=7)
            seed = f", seed {trial.seed}" if len(shown) > 1 else ""
            axis.set_title(f"cluster {c}{seed}, round {number}" if c == 0 else f"cluster {c}")
        row[0].set_ylabel("rows of a layer (%),\nmost sent first")
    figure.colorbar(image, ax=panels.ravel().tolist(), label="share that sent it", aspect=20)
    return Drawing(
        f"Rows sent by {entry.label}",
        figure,
        "For every adapted layer, the share of a cluster's clients (by assignment and examples) "
        "that sent each output row of their update in the last evaluated round; rows sorted in "
        "each column. A sharp edge: the clients agree on which rows matter; steps: each keeps its "
        "own. At 0 nobody sent the row, and it stays as it was.",
    )
