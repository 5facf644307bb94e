"""What a run directory says of its experiment: what it is, the machine, how data are divided."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ..data.federation import Federation
from ..engine.row_file import RowFile
from ..errors import InputError
from ..run_format import FORMAT, check_format
from .directory import as_json, read_json, write_atomically
from .experiment import Experiment, parse

PACKAGES = ("fedtailor", "torch", "transformers", "peft", "datasets", "numpy")

FACTORY = "factory"  # the folder with the file of a model of one's own

_BLOCK = 1 << 16  # clients described at a time


def check_same(experiment: Experiment, out: Path) -> None:
    """Raise InputError if ``out`` holds anything but (part of) this experiment's run."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; the output must be a directory")
    if not (out / "experiment.json").exists():
        ours = {".lock", "experiment.json.new"}
        if out.exists() and any(path.name not in ours for path in out.iterdir()):
            raise InputError(f"{out} holds something that is not a run; choose an empty --out")
        return
    present = read_json(out / "experiment.json")
    check_format(present, out)
    wanted = json.loads(json.dumps(_content(experiment)))
    if present != wanted:
        keys = sorted(k for k in {*present, *wanted} if present.get(k) != wanted.get(k))
        raise InputError(
            f"{out} already holds a different run (it differs in {', '.join(keys)}); "
            f"choose another --out or remove it"
        )


def open_run(out: Path) -> Experiment:
    """The experiment of a run directory.

    Raises:
        InputError: ``out`` is no run directory, or another version of fedtailor wrote it.
    """
    if not (out / "experiment.json").is_file():
        raise InputError(f"{out} is not a run directory")
    content = read_json(out / "experiment.json")
    check_format(content, out)
    return parse({key: value for key, value in content.items() if key != "format"})


def with_stored_factory(experiment: Experiment, out: Path) -> Experiment:
    """The experiment with a model of one's own as it was when the run began."""
    if experiment.model.factory is None:
        return experiment
    file, _, function = experiment.model.factory.rpartition(":")
    factory = f"{out.resolve() / FACTORY / Path(file).name}:{function}"
    return replace(experiment, model=replace(experiment.model, factory=factory))


def _store_factory(experiment: Experiment, out: Path) -> None:
    """Copy the file of a model of one's own, or check that it is the one that the run began with.

    Raises:
        InputError: it has changed.
    """
    if experiment.model.factory is None:
        return
    file = Path(experiment.model.factory.rpartition(":")[0])
    stored, content = out / FACTORY / file.name, file.read_bytes()
    if not stored.exists():
        stored.parent.mkdir(exist_ok=True)
        write_atomically(stored, content)
    elif stored.read_bytes() != content:
        raise InputError(
            f"{file} has changed since {out} was begun, which keeps it as {stored}; choose another "
            f"--out"
        )


def _content(experiment: Experiment) -> dict[str, Any]:
    return {"format": FORMAT, **experiment.as_dict()}


def write_manifest(
    experiment: Experiment, federations: Mapping[int, Federation], out: Path
) -> None:
    """Write what is fixed before the first round; ``experiment.json`` first, it marks a run.

    Raises:
        InputError: what is there was made of other data.
    """
    if not (out / "experiment.json").exists():
        write_atomically(out / "experiment.json", as_json(_content(experiment)))
    _store_factory(experiment, out)
    if not (out / "environment.json").exists():
        write_atomically(out / "environment.json", as_json(_environment()))
    (out / "partitions").mkdir(exist_ok=True)
    for seed, federation in federations.items():
        path = out / "partitions" / f"seed-{seed}.json"
        content = data_manifest(federation)
        if not path.exists():
            _write_holdings(federation, path.with_suffix(".safetensors"))
            write_atomically(path, as_json(content))
        elif any(read_json(path).get(key) != content[key] for key in ("data", "public", "digest")):
            raise InputError(
                f"the data or their split have changed since {out} was begun; choose another --out"
            )


def data_manifest(federation: Federation) -> dict[str, Any]:
    """What the data are, and how they are divided."""
    dataset = federation.dataset
    return {
        "digest": federation.partition.digest,
        "data": dataset.digest,
        "public": None if federation.public is None else federation.public.digest,
        "clients": federation.num_clients,
        "task": dataset.task,
        "modality": dataset.modality,
        "picture": dataset.picture,
        "classes": list(dataset.classes),
    }


def _write_holdings(federation: Federation, path: Path) -> None:
    """Who holds how much, a row a client; a part of the clients at a time."""
    partition, dataset, clients = federation.partition, federation.dataset, federation.num_clients
    columns = {
        "train": partition.train.sizes(),
        "validation": partition.validation.sizes(),
        "test": partition.test.sizes(),
    }
    if partition.clusters is not None:
        columns["clusters"] = partition.clusters
    row = {name: torch.zeros((), dtype=torch.int32) for name in columns}
    if dataset.labels is not None:
        most = max(int(shares.sizes().max()) for shares in partition.shares)
        small = most * len(partition.shares) < 256
        dtype = torch.uint8 if small else torch.int32
        row["labels"] = torch.zeros(dataset.num_classes, dtype=dtype)
    path.unlink(missing_ok=True)  # of a run that was killed here
    file = RowFile(path, clients, row)
    for start in range(0, clients, _BLOCK):
        some = slice(start, start + _BLOCK)
        rows = {name: torch.from_numpy(values[some]) for name, values in columns.items()}
        if dataset.labels is not None:
            counts = partition.counts(dataset.labels, dataset.num_classes, some)
            rows["labels"] = torch.from_numpy(counts)
        file.write(start, rows)
    file.sync()


def _environment() -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {name: version(name) for name in PACKAGES},
    }
