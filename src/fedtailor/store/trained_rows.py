"""The rows that a run's models are trained on, as hashes in a file of the run directory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import save

from ..data.federation import Federation
from ..data.table import Fingerprints
from ..errors import InputError
from .files import write_atomically
from .format import check_tensors, checksum, damaged, seal_tensors
from .read import read_data_manifest, tensors

_MOST_ROWS = 2_000_000  # to hash more takes long
_MOST_CLIENTS = 10_000  # to divide the rows of more takes long


def write_trained_rows(federation: Federation, out: Path, seed: int) -> str | None:
    """Write which rows the models of a run with a seed are trained on: ``rows``, its own ones, and
    ``before``, those of the run that it goes on from; each is left out if it is not known. Returns
    the file's checksum, for ``trained`` of `data_manifest`; None if no row is known, and no file
    is written."""
    found = {}
    if not has_too_many(federation):
        train = federation.partition.train.rows
        found["rows"] = np.unique(federation.dataset.fingerprints(train))
    if federation.trained_before is not None:
        found["before"] = federation.trained_before
    if not found:
        return None
    content = seal_tensors(save(found))
    write_atomically(trained_rows_file(out, seed), *content)
    return checksum(*content)


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
    """Whether rows can't be hashed: they are too many, or lie at the clients' sites."""
    rows = sum(len(shares.values) for shares in federation.partition.shares)
    return federation.remote or rows > _MOST_ROWS or federation.num_clients > _MOST_CLIENTS


def check_trained_rows(file: Path, stated: str | None) -> bool:
    """Check a file of trained rows, by the checksum in the run's manifest, too, if that is
    ``stated``; whether the file has one of its own."""
    has_checksum = check_tensors(file)
    if stated not in (None, checksum(file.read_bytes())):
        raise damaged(file)
    return has_checksum


def _read(out: Path, seed: int) -> dict[str, Fingerprints]:
    file = trained_rows_file(out, seed)
    stated = read_data_manifest(out / "partitions" / f"seed-{seed}.json").get("trained")
    if stated is None and not file.exists():
        return {}
    check_trained_rows(file, stated)
    found: dict[str, Fingerprints] = tensors(file)
    for name, hashes in found.items():
        if hashes.dtype != np.uint64 or hashes.ndim != 1:
            raise InputError(
                f"{file}: {name} is {hashes.dtype} {list(hashes.shape)}; must be hashes, uint64 [n]"
            )
    return found


def trained_rows_file(out: Path, seed: int) -> Path:
    """Where the hashes of a run's trained rows lie."""
    return out / "partitions" / f"seed-{seed}-trained.safetensors"
