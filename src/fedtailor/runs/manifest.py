"""What a run directory says of its experiment: what it is, the machine, how data are divided."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..data.federation import Federation
from ..data.labels import majority_class
from ..data.table import Dataset
from ..errors import InputError
from ..store.files import make_folder, write_atomically, write_json
from ..store.format import FORMAT, check_there, checksum, has_commit, seal_json
from ..store.read import read_data_manifest as read_data_manifest
from ..store.read import read_environment
from ..store.read import read_experiment as read_experiment
from ..store.row_file import RowFile
from ..store.trained_rows import write_trained_rows
from ..user_code import stored
from .base_model import MODEL_FILE, check_model, record_model
from .experiment import Experiment, OwnCode, by_label, own_code, parse, source_place
from .extend import check_extends, extended
from .settings import Settings, changed

PACKAGES = ("fedtailor", "torch", "transformers", "peft", "datasets", "numpy")

_BLOCK = 1 << 16  # clients described at a time

# Clients for whom the majority class is worked out. It needs their held-out rows, which stay in
# memory for so many clients: the first evaluation uses them again.
_MOST_SCORED = 10_000


def check_same(
    experiment: Experiment, out: Path, trials: Sequence[tuple[int, str]] | None = None
) -> dict[str, Any]:
    """Check that ``trials`` of ``experiment``, pairs (seed, label), or all can be run in ``out``,
    where nothing is, or a run that they go on with; return the content of ``experiment.json`` for
    them."""
    content = {"format": FORMAT, **experiment.as_dict()}
    hashes = {place: origin.sha256 for place, origin in experiment.sources.items()}
    if sources := {k: sha256 for k, sha256 in hashes.items() if not k.startswith("methods/")}:
        content["sources"] = sources
    wanted: dict[str, Any] = json.loads(json.dumps(content))
    for place in (out, *out.parents):
        if place.exists() and not place.is_dir():
            raise InputError(f"{place} is a file; the output must be a directory")
    if not (out / "experiment.json").exists():
        places = [".lock", "experiment.json", MODEL_FILE, *copies(experiment)]
        ours = {out / place for name in places for place in (name, f"{name}.new")}
        if any(path not in ours and not path.is_dir() for path in out.rglob("*")):
            raise InputError(f"{out} is no run (it has no experiment.json); choose an empty --out")
        return wanted
    present = read_experiment(out)
    _check_sources(present, wanted, out)
    check_model(experiment.model, out)
    check_extends(present, wanted, experiment, out)
    return extended(present, wanted, out, trials)


def is_as_it_was(experiment: Experiment, out: Path, trials: Sequence[tuple[int, str]]) -> bool:
    """Whether ``out`` holds all ``trials`` of ``experiment``, pairs (seed, label), and no local
    file of its data was written or moved since the run was begun. One that is gone counts as
    unchanged."""
    file = out / "experiment.json"
    begun = [out / "partitions" / f"seed-{seed}.json" for seed in experiment.seeds]
    if not all(path.exists() for path in (file, *begun)):
        return False
    if file.read_bytes() != seal_json(check_same(experiment, out, trials)):
        return False
    data, public = experiment.data, experiment.public
    paths = [Path(p).expanduser() for p in (data.path, data.test_path, public.path) if p]
    paths += [file for path in paths if path.is_dir() for file in path.rglob("*.json")]
    changed = [path.stat().st_ctime for path in paths if path.exists()]
    return max(changed, default=0.0) < min(path.stat().st_mtime for path in begun)


def _sha256(content: Mapping[str, Any], code: OwnCode) -> str | None:
    """What an ``experiment.json`` says that the source of ``code`` has; None: nothing."""
    place = source_place(code.reference, code.folder)
    is_method, sources = code.name == "class", content.get("sources", {})
    stated: str | None = code.section.get("sha256") if is_method else sources.get(place)
    return stated


def _check_sources(present: Mapping[str, Any], wanted: Mapping[str, Any], out: Path) -> None:
    before = {(code.key, code.reference): _sha256(present, code) for code in own_code(present)}
    for code in own_code(wanted):
        old, now = before.get((code.key, code.reference)), _sha256(wanted, code)
        if None not in (old, now) and old != now:
            place = code.reference.rpartition(":")[0]
            copy = f" ({out / code.folder / place} is a copy)" * place.endswith(".py")
            way_out = f"restore it{copy}, or choose another --out"
            raise InputError(f"{code.key}: {place} has changed since {out} was begun; {way_out}")


def open_run(out: Path, settings: Settings = ()) -> Experiment:
    """The experiment of a run directory, which has copies of the user's own files, changed by
    ``key=value`` settings as a file's would be."""
    content = read_experiment(out)
    del content["format"]
    for code in own_code(content):
        try:
            sha256 = _sha256(content, code)
            code.section[code.name] = stored(code.reference, out / code.folder, sha256)
        except InputError as error:
            raise InputError(f"{code.key}: {error}") from error
    content.pop("sources", None)
    if settings:
        content["methods"] = by_label(content["methods"])
    return parse(changed(content, settings))


def write_manifest(
    experiment: Experiment,
    federations: Mapping[int, Federation],
    out: Path,
    trials: Sequence[tuple[int, str]],
) -> None:
    """Write what is fixed before the first round of ``trials``. ``experiment.json`` marks a run;
    what is needed to open it is there before."""
    content = seal_json(check_same(experiment, out, trials))
    manifests = check_data(federations, out)
    write_copies(copies(experiment), out)
    file = out / "experiment.json"
    if not file.exists():
        record_model(experiment.model, out)
    if not file.exists() or file.read_bytes() != content:
        write_atomically(file, content)
    if (out / "environment.json").exists():
        read_environment(out)  # which is checked
    else:
        write_json(out / "environment.json", _environment())
    make_folder(out / "partitions")
    for seed, federation in federations.items():
        path = out / "partitions" / f"seed-{seed}.json"
        if not path.exists():
            clients = experiment.plan.evaluated_and_novel(federation)
            holdings = _write_holdings(federation, path.with_suffix(".safetensors"), clients)
            trained = write_trained_rows(federation, out, seed)
            stated = {"holdings": holdings, "trained": trained}
            write_json(path, {"seed": seed, **manifests[seed], **stated})


def copies(experiment: Experiment) -> dict[str, bytes]:
    """The user's own files, by their place in the run directory, with those that they import from
    their folders. Raises InputError where two files would have the same place."""
    found: dict[str, bytes] = {}
    for place, own in experiment.sources.items():
        if own.path is not None:
            folder = Path(place).parent
            files = {place: own.source, **{f"{folder}/{n}": s for n, s in own.beside.items()}}
            for file, source in files.items():
                if found.setdefault(file, source) != source:
                    other = f"{own.path.parent} has a {Path(file).name} that differs from another"
                    raise InputError(f"{other}, and both would be copied to {file}; rename one")
    return found


def write_copies(files: Mapping[str, bytes], out: Path) -> None:
    """Write what `copies` returns."""
    for place, source in files.items():
        copy = out / place
        if not copy.exists() or copy.read_bytes() != source:  # of a run that was killed here
            make_folder(copy.parent)
            write_atomically(copy, source)


def check_data(federations: Mapping[int, Federation], out: Path) -> dict[int, dict[str, Any]]:
    """The `data_manifest` of each seed; InputError where ``out`` holds a run of other data."""
    manifests = {seed: data_manifest(federation) for seed, federation in federations.items()}
    for seed, manifest in manifests.items():
        path = out / "partitions" / f"seed-{seed}.json"
        if any(map(has_commit, out.glob(f"methods/*/seed-{seed}"))):
            check_there(path, out / "environment.json")
        before = read_data_manifest(path) if path.exists() else manifest
        if not _same_rows(before, manifest):
            raise InputError(
                f"the data or their split have changed since {out} was begun; put them back, or "
                "choose another --out (with start_from its models go on with the new data)"
            )
        if (found := renamed(before, manifest)) is not None:
            number, old, new = found
            raise InputError(
                f"client {number} was {old!r} when {out} was begun and is {new!r} now; give "
                "clients their names back, or choose another --out"
            )
    return manifests


def same_data(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two `data_manifest` are those of the same data of the same clients, divided in the
    same way."""
    return _same_rows(a, b) and renamed(a, b) is None


def _same_rows(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return all(a.get(key) == b.get(key) for key in ("data", "public", "digest"))


def renamed(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[int, str, str] | None:
    """The first client that has two names in two `data_manifest`: its number and the names. One
    that has a name in one of them alone is the same client."""
    pairs = enumerate(zip(a.get("names") or (), b.get("names") or (), strict=False))
    differing = ((number, *names) for number, names in pairs if all(names) and len({*names}) > 1)
    return next(differing, None)


def data_manifest(federation: Federation) -> dict[str, Any]:
    """What the data are, and how they are divided."""
    return {
        "digest": federation.partition.digest,
        "data": federation.dataset.digest,
        "public": None if federation.public is None else federation.public.digest,
        "clients": federation.num_clients,
        **about(federation.dataset),
        "names": None if federation.names is None else list(federation.names),
        "omissions": [asdict(one) for one in federation.omissions],
    }


def about(dataset: Dataset) -> dict[str, Any]:
    """The part of a `data_manifest` that says what the examples of a data set are."""
    return {
        "task": dataset.task,
        "modality": dataset.modality,
        "picture": dataset.picture,
        "classes": list(dataset.classes),
        **({"scale": list(dataset.scale)} if dataset.scale else {}),
        **({"pair": list(dataset.pair)} if dataset.pair else {}),
    }


def _write_holdings(federation: Federation, path: Path, evaluated: Sequence[int]) -> str:
    """Who holds how much, a row a client; a part of the clients at a time. Of those that are
    ``evaluated``, what their most frequent class would get right. Returns the file's checksum."""
    partition, dataset, clients = federation.partition, federation.dataset, federation.num_clients
    splits = {"train": partition.train, "validation": partition.validation, "test": partition.test}
    columns = {name: split.sizes() for name, split in splits.items()}
    if partition.clusters is not None:
        columns["clusters"] = partition.clusters
    if dataset.class_numbers is not None:
        scored = evaluated if len(evaluated) <= _MOST_SCORED else ()
        columns["majority"], columns["majority_correct"] = majority_class(federation, scored)
    row = {name: torch.zeros((), dtype=torch.int32) for name in columns}
    if dataset.class_numbers is not None:
        most = max(int(shares.sizes().max()) for shares in partition.shares)
        small = most * len(partition.shares) < 256
        dtype = torch.uint8 if small else torch.int32
        row["labels"] = torch.zeros(dataset.num_classes, dtype=dtype)
    elif federation.told_labels is not None:
        row["labels"] = torch.zeros(len(dataset.classes), dtype=torch.int32)
    path.unlink(missing_ok=True)  # of a run that was killed here
    file = RowFile(path, clients, row, checksums=False)  # one of the whole file is cheaper
    for start in range(0, clients, _BLOCK):
        some = slice(start, start + _BLOCK)
        rows = {name: torch.from_numpy(values[some]) for name, values in columns.items()}
        if dataset.class_numbers is not None:
            counts = partition.counts(dataset.class_numbers, dataset.num_classes, some)
            rows["labels"] = torch.from_numpy(counts)
        elif federation.told_labels is not None:
            rows["labels"] = torch.from_numpy(federation.told_labels[some])
        file.write(start, rows)
    file.sync()
    return checksum(np.memmap(path, np.uint8, "r").data)


def _environment() -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}",
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {name: version(name) for name in PACKAGES},
        "id": os.urandom(8).hex(),
    }
