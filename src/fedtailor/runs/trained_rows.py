"""The rows that a run's models are trained on, as hashes in a file of the run directory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save

from ..data.federation import Federation
from ..data.table import Fingerprints
from ..run_format import check_tensors, seal_tensors
from .files import write_atomically

_MOST_ROWS = 2_000_000  # to hash more takes long
_MOST_CLIENTS = 10_000  # to divide the rows of more takes long


def write_trained_rows(federation: Federation, out: Path, seed: int) -> None:
    """Write which rows the models of a run with a seed are trained on: ``rows``, its own ones, and
    ``before``, those of the run that it goes on from; each is left out if it is not known."""
    found = {}
    if not has_too_many(federation):
        train = federation.partition.train.rows
        found["rows"] = np.unique(federation.dataset.fingerprints(train))
    if federation.trained_before is not None:
        found["before"] = federation.trained_before
    if found:
        write_atomically(_file(out, seed), *seal_tensors(save(found)))


def read_trained_rows(out: Path, seed: int) -> Fingerprints | None:
    """All rows that the models in a run directory were trained on; None: not known."""
    found = _read(out, seed)
    if "rows" not in found:
        return None
    return np.union1d(found["rows"], found.get("before", np.empty(0, np.uint64)))


def read_trained_before(out: Path, seed: int) -> Fingerprints | None:
    """The rows that the models in a run directory had been trained on before; None: not known."""
    return _read(out, seed).get("before")


def has_too_many(federation: Federation) -> bool:
    """Whether a federation has too many rows or clients for its rows to be hashed, or they lie at
    their sites."""
    rows = sum(len(shares.values) for shares in federation.partition.shares)
    return federation.remote or rows > _MOST_ROWS or federation.num_clients > _MOST_CLIENTS


def _read(out: Path, seed: int) -> dict[str, Fingerprints]:
    file = _file(out, seed)
    if not file.exists():
        return {}
    check_tensors(file)
    found: dict[str, Fingerprints] = load_file(file)
    return found


def _file(out: Path, seed: int) -> Path:
    return out / "partitions" / f"seed-{seed}-trained.safetensors"
