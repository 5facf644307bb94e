"""The files of the base model that a run was begun with: a run holds hashes of them.

A model is named by a folder, a package or the hub, and what a name stands for may change. So a run
holds a hash of each file that transformers reads, and the file's size and times. A large file is
read again only where one of these differs; nobody can set the time of a file's last change of
status.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import xxhash

from ..errors import InputError
from ..models.config import ModelConfig
from ..models.packages import BUILTIN
from ..models.source import locate
from ..store.checked import records
from ..store.files import read_record, write_json
from ..user_code import FROM_PYTHON, origin_of

MODEL_FILE = "model.json"

_SUFFIXES = {".json", ".safetensors", ".bin", ".txt", ".model", ".jinja", ".gguf", ".pth", ".pt"}
_WEIGHTS = {".safetensors", ".bin", ".gguf", ".pth", ".pt"}
_COMMIT = "the commit of the hub"
_SMALL = 1 << 26  # bytes: a file up to this size is always read again


@dataclass(frozen=True)
class FileHash:
    """What is known of a file: bytes, nanoseconds of its last changes of content and of status, and
    the hash of its content."""

    size: int
    modified: int
    changed: int
    hash: str


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model, by their names in its folder, each a `FileHash` as plain values.
    ``commit`` is that of a model of the hub."""

    files: dict[str, dict[str, int | str]]
    commit: str | None = None


def record_model(config: ModelConfig, out: Path) -> None:
    """Write hashes of the model's files into the run directory ``out``."""
    if found := _files(config):
        files = {name: asdict(_hash(file)) for name, file in found.items()}
        content = asdict(ModelFiles(files, _commit(found)))
        write_json(out / MODEL_FILE, content)


def fingerprint(config: ModelConfig, out: Path | None = None) -> dict[str, str] | None:
    """Hashes of the model's files by name, for a comparison with another machine's; read in the run
    ``out`` where it holds them; empty for a model of the package, or from Python; None for a model
    of the hub that is not on this machine yet."""
    if config.factory is not None:
        origin = origin_of(config.factory)
        return {origin.reference: origin.sha256 or ""}
    if not has_files(config):
        return {}
    if out is not None and (out / MODEL_FILE).exists():
        told, known = _read(out / MODEL_FILE)
        hashes, commit = {name: one.hash for name, one in known.items()}, told.commit
    else:
        files = _files(config)
        hashes, commit = {name: _content(file) for name, file in files.items()}, _commit(files)
    return ({**hashes, _COMMIT: commit} if commit else hashes) or None


def difference(own: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """The name of a file in which two models differ by their `fingerprint`; None if in none. Of a
    model of the hub each machine may have other files."""
    names = own.keys() & other.keys()
    if _COMMIT not in names:
        names = own.keys() | other.keys()
    return min((name for name in names if own.get(name) != other.get(name)), default=None)


def check_model(config: ModelConfig, out: Path) -> bool:
    """Check that the files of the model are those that the run in ``out`` was begun with; return
    whether the run holds hashes of them."""
    path = out / MODEL_FILE
    if not path.exists():
        return False
    told, known = _read(path)
    try:
        now = _files(config)
    except InputError:  # it is not on this machine, as whoever loads it will say
        return True
    if not now:
        return True
    changed = {name for name in known if name not in now or not _is_same(known[name], now[name])}
    if told.commit is None:  # else files are fetched as they are needed
        changed |= now.keys() - known.keys()
    if changed:
        place = next(iter(now.values())).parent
        commit = f" (commit {told.commit} of the hub)" if told.commit else ""
        raise InputError(
            f"the base model is not the one that {out} was trained with: {min(changed)} of {place} "
            f"has changed since; put it back as it was{commit}, or choose another --out"
        )
    return True


def same_models(a: Path, b: Path) -> bool:
    """Whether two files of hashes are those of the same model."""
    first, second = ({name: one.hash for name, one in _read(path)[1].items()} for path in (a, b))
    return first == second


def pinned(config: ModelConfig, out: Path) -> ModelConfig:
    """``config``, at the commit of the hub that the run in ``out`` was begun with."""
    path = out / MODEL_FILE
    if config.revision is not None or not path.exists():
        return config
    return replace(config, revision=_read(path)[0].commit)


def _read(path: Path) -> tuple[ModelFiles, dict[str, FileHash]]:
    files = read_record(ModelFiles, path)
    return files, records(FileHash, files.files, f"{path}: files")


def has_files(config: ModelConfig) -> bool:
    """Whether the model is read from files, and not built by code."""
    builtin = BUILTIN.get(config.name)
    from_code = config.factory is not None or config.name.startswith(FROM_PYTHON)
    return not from_code and (builtin is None or builtin.network is None)


def _commit(files: Mapping[str, Path]) -> str | None:
    folders = {file.parent for file in files.values()}
    return next((f.name for f in folders if f.parent.name == "snapshots"), None)


def _files(config: ModelConfig) -> dict[str, Path]:
    """The files of a model, by name; none of one that has no files, or is not on this machine."""
    if not has_files(config):
        return {}
    builtin = BUILTIN.get(config.name)
    folder = Path(locate(config))
    if not folder.exists():  # a name of the hub
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(config.name, "config.json", revision=config.revision)
        if not isinstance(cached, str):
            return {}
        folder = Path(cached).parent
    if folder.is_file():
        return {folder.name: folder}
    wanted = _SUFFIXES if config.pretrained else _SUFFIXES - _WEIGHTS
    if builtin is not None:  # what was converted on this machine has the same weights everywhere
        wanted = wanted & _WEIGHTS
    return {
        path.name: path
        for path in sorted(folder.iterdir())
        if path.suffix in wanted and path.is_file()
    }


def _is_same(known: FileHash, path: Path) -> bool:
    about = path.stat()
    if about.st_size != known.size:
        return False
    times = (about.st_mtime_ns, about.st_ctime_ns)
    if about.st_size > _SMALL and times == (known.modified, known.changed):
        return True
    return _content(path) == known.hash


def _hash(path: Path) -> FileHash:
    about = path.stat()
    return FileHash(about.st_size, about.st_mtime_ns, about.st_ctime_ns, _content(path))


def _content(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
