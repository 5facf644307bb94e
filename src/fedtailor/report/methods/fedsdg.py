"""FedSDG's figure: the gates of every client, one for each block of the model."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..drawing import Drawing, centred, new_figure
from ..figures import client_ticks
from ..read import Trial
from ..select import Entry
from ..tensors import tensors

REACH = 0.02  # gates lie between 0 and 1, and begin at 0.5; closer ones look alike


def _gates(trial: Trial) -> NDArray[np.float64]:
    """Return the gates sigmoid(a) ``[K, L]``, not a number for clients that never took part."""
    private = tensors(trial.folder / "private.safetensors", "gate_logits", "__seen__")
    a = private["gate_logits"].astype(np.float64)  # [K, L]
    m: NDArray[np.float64] = 1 / (1 + np.exp(-a))
    m[private["__seen__"] == 0] = np.nan
    return m


def _range(gates: NDArray[np.float64]) -> str:
    known = gates[~np.isnan(gates)]
    return f" They lie between {known.min():.3f} and {known.max():.3f}." if len(known) else ""


def gate_heat_map(entry: Entry) -> Drawing:
    """Draw the gate of every client and block, one panel a seed."""
    from matplotlib.colors import TwoSlopeNorm

    gates = [_gates(trial) for trial in entry.trials]
    blocks = gates[0].shape[1]
    values = np.concatenate([m.ravel() for m in gates])
    low, high = centred(0.5, values, REACH)
    norm = TwoSlopeNorm(0.5, low, high)
    figure = new_figure(0.9 + len(gates) * (0.9 + 0.14 * min(blocks, 24)))
    panels = figure.subplots(len(gates), 1, squeeze=False)[:, 0]
    for axis, m, trial in zip(panels, gates, entry.trials, strict=True):
        trained = np.flatnonzero(~np.isnan(m[:, 0]))
        untrained = np.flatnonzero(np.isnan(m[:, 0])).tolist()
        by_mean = np.argsort(-m[trained].mean(axis=1), kind="stable")
        order = [*trained[by_mean].tolist(), *untrained]
        image = axis.imshow(m[order].T, aspect="auto", interpolation="none", norm=norm, cmap="PuOr")
        if untrained:
            edge = len(trained) - 0.5
            axis.axvspan(edge, len(m) - 0.5, facecolor="none", edgecolor="#b5b5b5", hatch="////")
        client_ticks(axis, order, entry.run.partitions[trial.seed])
        axis.set_yticks(range(0, blocks, 1 + (blocks - 1) // 12))
        axis.set_title(f"seed {trial.seed}, after round {trial.commit.round}")
        axis.set_ylabel("block")
    panels[-1].set_xlabel("clients, strongest mean gate first")
    figure.colorbar(image, ax=list(panels), label="gate", aspect=12 * (1 + len(gates)))
    return Drawing(
        f"Gates of {entry.label}",
        figure,
        "The colour gives each client's gate in each block of the model: the sigmoid of the gate "
        "logit after the last committed round. With gate 0 the block uses the shared model alone, "
        f"with gate 1 the private adapter in full; gates start at 0.5.{_range(values)} Colours go "
        f"from {low:.3f} to {high:.3f}. Clients are ordered by mean gate; hatched clients never "
        "took part.",
    )
