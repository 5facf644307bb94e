"""What a line of results keeps beside the scores: the curve, and what the method shows."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedtailor.report.charts.pfedgate import gating_tree
from fedtailor.store.metrics import summary
from fedtailor.store.read import Partition, Trial
from fedtailor.store.selection import by_round
from fedtailor.store.tensors import tensors


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
        correlation = gating_tree(trial, partition).label_correlation
        values["like_layers"] = None if correlation is None else round(correlation, 4)
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
