"""What a run directory says of its experiment: what it is, the machine, how data are divided."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ..data.federation import Federation
from ..data.majority import majority_class
from ..engine.row_file import RowFile
from ..errors import InputError
from ..run_format import FORMAT, check_format
from ..user_code import absolute
from .directory import as_json, read_json, write_atomically
from .experiment import Experiment, Settings, by_label, changed, parse
from .extend import check_extends, united
from .trained_rows import write_trained_rows

PACKAGES = ("fedtailor", "torch", "transformers", "peft", "datasets", "numpy")

FACTORY = "factory"  # the folder with the file of a model of one's own

_BLOCK = 1 << 16  # clients described at a time

# Clients for whom the majority class is worked out. It needs their held-out rows, which stay in
# memory for so many clients: the first evaluation uses them again.
_MOST_SCORED = 10_000


def check_same(experiment: Experiment, out: Path) -> dict[str, Any]:
    """Check that ``experiment`` can be run in ``out``: nothing is there, or a run that it goes on
    with, perhaps with more methods, seeds or rounds.

    Returns:
        The content of ``experiment.json`` from then on.

    Raises:
        InputError: ``out`` holds anything else.
    """
    wanted: dict[str, Any] = json.loads(json.dumps(_content(experiment)))
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; the output must be a directory")
    if not (out / "experiment.json").exists():
        ours = {".lock", "experiment.json.new"}
        if out.exists() and any(path.name not in ours for path in out.iterdir()):
            raise InputError(f"{out} holds something that is not a run; choose an empty --out")
        return wanted
    present = read_experiment(out)
    _check_sources(present.get("methods", []), wanted["methods"], out)
    check_extends(present, wanted, experiment.schedule, out)
    return united(present, wanted)


def _check_sources(present: Any, wanted: Any, out: Path) -> None:
    """Raise InputError where the file of a method of the user's own has changed."""
    before = {(m["label"], m.get("class")): m for m in present}
    for method in wanted:
        label, reference = method["label"], method.get("class")
        old = before.get((label, reference), method)
        if reference is not None and old["sha256"] != method["sha256"]:
            place = reference.rpartition(":")[0]
            copy = f" ({out / 'methods' / label / place} is a copy)" * place.endswith(".py")
            raise InputError(
                f"methods.{label}: {place} has changed since {out} was begun; restore it{copy}, or "
                f"choose another --out"
            )


def read_experiment(out: Path) -> dict[str, Any]:
    """The content of ``experiment.json`` in a run directory.

    Raises:
        InputError: ``out`` is no run directory, or another version of fedtailor wrote it; a method
            of the user's own can't be loaded, or has changed.
    """
    if not (out / "experiment.json").is_file():
        raise InputError(f"{out} is not a run directory")
    content = read_json(out / "experiment.json")
    check_format(content, out)
    return content


def open_run(out: Path, settings: Settings = ()) -> Experiment:
    """The experiment of a run directory, changed by ``key=value`` settings as a file's would be.

    Methods of the user's own come from the copies of their files that it holds.

    Raises:
        InputError: ``out`` is no run directory, or another version of fedtailor wrote it; a method
            of the user's own can't be loaded, or has changed.
    """
    content = read_experiment(out)
    del content["format"]
    for method in content.get("methods", []):
        if "class" in method:
            method["class"] = absolute(method["class"], out / "methods" / method["label"])
    if settings:
        content["methods"] = by_label(content["methods"])
    return parse(changed(content, settings))


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
        InputError: ``out`` holds a different run, or one of other data.
    """
    content = as_json(check_same(experiment, out))
    manifests = {seed: data_manifest(federation) for seed, federation in federations.items()}
    paths = {seed: out / "partitions" / f"seed-{seed}.json" for seed in federations}
    for seed, path in paths.items():
        if path.exists() and not same_data(read_json(path), manifests[seed]):
            raise InputError(
                f"the data or their split have changed since {out} was begun; choose another --out "
                f"(with start_from its models go on with the new data)"
            )
    file = out / "experiment.json"
    if not file.exists() or file.read_bytes() != content:
        write_atomically(file, content)
    _store_factory(experiment, out)
    if not (out / "environment.json").exists():
        write_atomically(out / "environment.json", as_json(_environment()))
    for label, origin in experiment.origins.items():
        if origin.path is not None:
            copy = out / "methods" / label / origin.path.name
            copy.parent.mkdir(parents=True, exist_ok=True)
            if not copy.exists():
                write_atomically(copy, origin.source)
    (out / "partitions").mkdir(exist_ok=True)
    for seed, path in paths.items():
        if not path.exists():
            clients = evaluated_clients(experiment, federations[seed])
            _write_holdings(federations[seed], path.with_suffix(".safetensors"), clients)
            write_trained_rows(federations[seed], out, seed)
            write_atomically(path, as_json(manifests[seed]))


def same_data(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two `data_manifest` are those of the same data, divided in the same way."""
    return all(a.get(key) == b.get(key) for key in ("data", "public", "digest"))


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
        "names": None if federation.names is None else list(federation.names),
        "omissions": [asdict(one) for one in federation.omissions],
    }


def evaluated_clients(experiment: Experiment, federation: Federation) -> tuple[int, ...]:
    """The clients whose models are evaluated, ascending; novel ones among them."""
    novel = experiment.cohort.novel
    clients = federation.evaluation_clients(experiment.evaluate.clients, novel)
    return tuple(sorted({*clients, *federation.novel(novel)}))


def _write_holdings(federation: Federation, path: Path, evaluated: Sequence[int]) -> None:
    """Who holds how much, a row a client; a part of the clients at a time. Of those that are
    ``evaluated``, what their most frequent class would get right."""
    partition, dataset, clients = federation.partition, federation.dataset, federation.num_clients
    columns = {
        "train": partition.train.sizes(),
        "validation": partition.validation.sizes(),
        "test": partition.test.sizes(),
    }
    if partition.clusters is not None:
        columns["clusters"] = partition.clusters
    if dataset.labels is not None:
        scored = evaluated if len(evaluated) <= _MOST_SCORED else ()
        columns["majority"], columns["majority_correct"] = majority_class(federation, scored)
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
