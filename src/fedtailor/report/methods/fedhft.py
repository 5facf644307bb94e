"""FedHFT's figure: the rows of the updates that clients send."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ..drawing import Drawing, new_figure
from ..read import Trial
from ..select import Entry

_SENT = "server/sent."
_BANDS = 100  # lines of a map; each is a mean over neighbouring rows of a layer

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
        if not paths:
            raise InputError(f"{trial.folder}: the file of round {number} lacks {_SENT}*")
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
