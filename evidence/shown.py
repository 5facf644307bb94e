"""What a line of results keeps beside the scores: the curve, and what the method shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.store.format import columns
from fedtailor.store.metrics import summary
from fedtailor.store.read import Partition, Trial, tensors
from fedtailor.store.selection import by_round


def shown(trial: Trial, partition: Partition, metric: str) -> dict[str, Any]:
    """The mean over clients on validation data by round, and what the method's mechanism shows, as
    plain values: FedSDG's gates by block; pFedGate's sparsity, and whether clients with similar
    labels have similar gating layers; FedMerge's weights; FedHFT's assignments. Keys without a
    value are left out."""
    curve = {
        str(number): round(summary(evaluation, metric).mean, 4)
        for number, evaluation in by_round(trial, "personal", "validation").items()
    }
    values = {"curve": curve, "gates": _gates(trial), **_diagnostics(trial)}
    if trial.method == "pfedgate":
        values["like_layers"] = like_layers(trial.folder / "private.safetensors", partition.labels)
    return {name: value for name, value in values.items() if value is not None}


def _gates(trial: Trial) -> list[list[float]] | None:
    """FedSDG's gates ``[n, L]`` of the clients that took part."""
    if trial.method != "fedsdg":
        return None
    private = tensors(trial.folder / "private.safetensors", "gate_logits", "__seen__")
    a = private["gate_logits"][private["__seen__"].astype(bool)].astype(np.float64)
    gates: list[list[float]] = np.round(1 / (1 + np.exp(-a)), 3).tolist()
    return gates


def _diagnostics(trial: Trial) -> dict[str, Any]:
    """What the last evaluation shows."""
    rounds = trial.diagnostics()
    found = rounds[-1][1] if rounds else {}
    values: dict[str, Any] = {}
    if "client/sparsity" in found:
        values["sparsity"] = round(float(np.mean(found["client/sparsity"])), 4)
    for name in ("weights", "assignments"):
        if f"server/{name}" in found:
            values[name] = np.round(found[f"server/{name}"].astype(np.float64), 3).tolist()
    return values


def like_layers(private: Path, labels: NDArray[Any] | None) -> float | None:
    """The rank correlation, over all pairs of clients that took part, of the Euclidean distance of
    their gating layers and the difference of their label shares: 1 if clients with similar gating
    layers have similar labels, 0 if there is no relation. None for few clients, or equal ones.

    The numbers of each tensor are divided by their standard deviation over clients, so that all
    tensors count the same whatever their scale.

    Args:
        private: pFedGate's private states.
        labels: the clients' examples by class, ``[K, classes]``; None: not known.
    """
    from scipy.spatial.distance import pdist
    from scipy.stats import spearmanr

    clients = np.flatnonzero(tensors(private, "__seen__")["__seen__"])
    if labels is None or len(clients) < 3:
        return None
    layers = []
    for name in sorted(columns(private)):
        learned = name.startswith(("gate.norm.", "gate.linear.", "gate.post."))
        if learned and not name.endswith(("running_mean", "running_var")):
            x = tensors(private, name)[name][clients].reshape(len(clients), -1).astype(np.float64)
            x = x - x.mean(axis=0)
            layers.append(x / (np.sqrt(np.square(x).mean()) or 1))
    counts = labels[clients].astype(np.float64)  # [n, classes]
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    of_layers, of_labels = pdist(np.hstack(layers)), pdist(shares, "cityblock") / 2
    if not np.ptp(of_layers) or not np.ptp(of_labels):
        return None
    return round(float(spearmanr(of_layers, of_labels).statistic), 4)
