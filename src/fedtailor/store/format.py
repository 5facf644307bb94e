"""The run directory's layout: its version, and the checksums in its files.

Whoever opens a run directory checks the version, and whoever reads a file the file's checksum:

- a JSON file has it as the last entry, over all others;
- a safetensors file has it in its metadata, over the whole file with the checksum's digits as 0;
- a file of clients' rows has that of its header there, and in `CHECKSUMS` one for each row, so that
  a round need not read all rows;
- a log's checksum, over its committed bytes, is in ``commit.json``, and so is one of all rows of
  each file of clients' private states.

A checksum is XXH3 of 64 bits.
"""

from __future__ import annotations

import errno
import functools
import json
import math
import os
import re
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import xxhash

from ..errors import InputError, brief, naming

# The end of a line of run.log about a trial: how far the run was then.
SHARE_OF_RUN = re.compile(r"; \d+ % of the run(, about .+ left)?$")

_LONGEST_NAME = 200  # bytes of a folder's name, with room for endings
FORMAT = 6
FLOWER_FILE = "flower.json"  # of a trial whose clients, elsewhere, keep their private states

REFUSED_FILE = "refused.jsonl"  # of a method with a seed over Flower: it is no log of `commit.json`
CHECKSUMS = "__checksum__"  # int64 [n], in a file of rows; 0 for a row of zeros
_KEY = "checksum"  # of a JSON file
_SEAL = b'{"__metadata__":{"checksum":"'  # begins a safetensors header
_BLANK = b"0" * 16
_AT = 8 + len(_SEAL)  # where the checksum is
_END = _AT + len(_BLANK)

Bytes = bytes | memoryview


def as_json(value: Any, indent: int | None = None) -> str:
    """Format plain data and dataclasses as JSON. Numbers that are not finite, for which it has no
    form, are null.

    >>> as_json({"auc": [0.5, float("nan")]})
    '{"auc": [0.5, null]}'
    """
    try:
        return json.dumps(value, indent=indent, allow_nan=False, default=vars)
    except ValueError:
        return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    value = vars(value) if is_dataclass(value) else value
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_format(experiment: Mapping[str, Any], out: Path) -> None:
    """Raise InputError where another version of fedtailor wrote the run directory ``out``."""
    if (version := experiment.get("format", 1)) != FORMAT:  # the first layout did not say
        older = isinstance(version, int) and version < FORMAT
        raise InputError(
            f"{out} has the run format {version!r} of {'an older' if older else 'a newer'} version "
            f"of fedtailor; this version reads format {FORMAT}: open the directory with the "
            "version that wrote it (environment.json names it), or run the experiment's file anew"
        )


def check_folder_name(what: str, name: str) -> None:
    """Check that a run's name or a method's label can name a folder, and be printed."""
    fits = name.isprintable() and 0 < len(name.encode()) <= _LONGEST_NAME
    if not fits or "/" in name or name.startswith("."):
        raise InputError(
            f"{what} {brief(name)} can't name a folder; allowed: 1 to {_LONGEST_NAME} printable "
            "characters, no '/', no leading '.'"
        )


def damaged(path: Path, what: str = "its checksum does not match") -> InputError:
    """Return the error for a file that is not as it was written."""
    return InputError(f"{path} is damaged: {what}; restore it from a copy, or run anew")


def missing(path: Path) -> InputError:
    """Return the error for a file that was written and is gone."""
    return InputError(f"{path} is missing; restore it from a copy, or run anew")


def check_there(*paths: Path) -> None:
    """Check that all files are there."""
    for path in paths:
        with suppress(OSError):  # of a name that no file can have
            if path.exists():
                continue
        raise missing(path)


def check_committed(files: Mapping[Path, str | None]) -> None:
    """Check that all files are there, and that each safetensors file is the one that was committed:
    it holds this checksum; None: any will do."""
    check_there(*files)
    for path, committed in files.items():
        if committed is not None and held_checksum(path) != committed:
            raise damaged(path, "it is not the file that was committed")


def held_checksum(path: Path) -> str | None:
    """Return the checksum that a safetensors file holds of itself; None if it holds none."""
    header = _header(path)
    return None if header is None else header[_AT:_END].decode(errors="replace")


def has_commit(folder: Path) -> bool:
    """Whether a round is committed in ``folder``, that of one method with one seed. Raises
    InputError where ``commit.json`` is missing, and the other files are those of such a round."""
    path, timings = folder / "commit.json", folder / "timings.jsonl"
    if path.exists():
        return True
    lines = timings.read_bytes().count(b"\n") if timings.exists() else 0
    was_there = lines > 1 or (folder / "server.safetensors").exists()  # a kill leaves one line
    if was_there and not path.exists():  # unless it was written just now
        raise missing(path)
    return False


def trial_folder(run: Path, label: str, seed: int) -> Path:
    """Where the run directory ``run`` has a trial: a method with a seed."""
    return run / "methods" / label / f"seed-{seed}"


def trial_of(folder: Path) -> tuple[str | None, int | None]:
    """Return the label and the seed of the trial in ``folder``; None for a folder of another name.

    >>> trial_of(Path("runs/quickstart/methods/fedsdg/seed-0"))
    ('fedsdg', 0)
    """
    seed = re.fullmatch(r"seed-(\d+)", folder.name)
    return (folder.parent.name, int(seed[1])) if seed else (None, None)


def check_belongs(path: Path, what: str, stated: str | int | None, here: str | int | None) -> None:
    """Check that a file is that of the method or the seed ``here``, if both are known."""
    if None not in (stated, here) and stated != here:
        raise InputError(
            f"{path}: it belongs to {what} {stated}, not to {what} {here}; restore it from a copy"
        )


def checksum(*parts: Bytes) -> str:
    """Return the checksum of all parts in a row, 16 hexadecimal digits.

    >>> checksum(b"to", b"gether") == checksum(b"together")
    True
    """
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def seal_json(content: Mapping[str, Any]) -> bytes:
    """Return a JSON file's bytes: indented, with a last newline and the checksum."""
    plain = json.loads(json.dumps(content))  # as it will be read
    sealed = {**plain, _KEY: _json_checksum(plain)}
    return (json.dumps(sealed, indent=2) + "\n").encode()


def unseal_json(content: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the ``content`` of a JSON file without its checksum, which is checked."""
    if _KEY in content and content.pop(_KEY) != _json_checksum(content):
        raise damaged(
            path, f"its checksum does not match (after a change by hand, delete {_KEY!r} there)"
        )
    return content


def _json_checksum(content: Mapping[str, Any]) -> str:
    return checksum(json.dumps(content, sort_keys=True).encode())


def whole_lines(path: Path) -> list[bytes]:
    """Return the lines of a file, without a last one that was cut short as the power failed."""
    return [line + b"\n" for line in path.read_bytes().split(b"\n")[:-1]]


def end_last_line(path: Path) -> None:
    """Cut off a last line that was cut short as the power failed; no file is fine, too."""
    if path.exists() and (whole := sum(map(len, whole_lines(path)))) < path.stat().st_size:
        with naming(path):
            os.truncate(path, whole)


def seal_tensors(encoded: bytes) -> tuple[bytes, memoryview]:
    """Return a safetensors file in two parts, of which the first, its header, has the checksum."""
    end = 8 + int.from_bytes(encoded[:8], "little")
    body = memoryview(encoded)[end:]
    return seal_header(encoded[8:end], body), body


def seal_header(header: bytes, *body: Bytes) -> bytes:
    """Return the start of a safetensors file with a checksum over it and ``body``."""
    tensors = header.strip()[1:]
    text = _SEAL + _BLANK + (b'"}' if tensors == b"}" else b'"},') + tensors
    text += b" " * (-len(text) % 8)
    start = struct.pack("<Q", len(text)) + text
    return start[:_AT] + checksum(start, *body).encode() + start[_END:]


def row_checksum(parts: Sequence[Bytes]) -> int:
    """Return the checksum of a row as in `CHECKSUMS`; ``parts`` are its tensors' bytes."""
    number = int(checksum(*parts), 16) ^ _of_zeros(sum(map(len, parts)))
    return number - 2**64 if number >= 2**63 else number


def combined_checksum(total: int) -> str:
    """Return one of all rows of a file, as in ``commit.json``, from the sum of theirs."""
    return f"{total % 2**64:016x}"


@functools.lru_cache(maxsize=64)
def _of_zeros(size: int) -> int:
    return int(xxhash.xxh3_64_intdigest(bytes(size)))


def check_tensors(path: Path, unsettled: Collection[int] = ()) -> bool:
    """Check a safetensors file against the checksums that it holds; return whether it holds any. In
    a file of rows, ``unsettled`` ones are not checked: a commit has not moved all of them yet."""
    import numpy as np  # here: every command imports this module, and few of them need it

    header = _header(path)
    if header is None:
        columns(path)  # it may only look as if it had no checksum
        return False
    data = np.memmap(path, np.uint8, "r")[len(header) :]
    if f'"{CHECKSUMS}"'.encode() in header:
        _check_rows(path, columns(path), len(header), unsettled)
    elif header[_AT:_END] != checksum(_blanked(header), data.data).encode():
        raise damaged(path)
    return True


def columns(path: Path) -> dict[str, Any]:
    """Return what the header of a file of rows says of each tensor: dtype, shape, data_offsets."""
    header = _header(path)
    if header is None:
        with path.open("rb") as file:
            header = file.read(8)
            size = min(int.from_bytes(header, "little"), path.stat().st_size)
            header += file.read(size)
    elif header[_AT:_END] != checksum(_blanked(header)).encode():
        raise damaged(path)
    try:
        found: dict[str, Any] = json.loads(header[8:])
        found.pop("__metadata__", None)
        size = len(header) + max(end for _, end in _places(found))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise damaged(path, "its header can't be read") from None
    if path.stat().st_size != size:
        raise damaged(path, "it is too short or too long")
    return found


def _places(header: Mapping[str, Any]) -> list[tuple[int, int]]:
    return [about["data_offsets"] for about in header.values()]


def _header(path: Path) -> bytes | None:
    """The header of a safetensors file with a checksum; None if it has none."""
    try:
        with path.open("rb") as file:
            start = file.read(_AT)
            if start[8:] != _SEAL:
                if not start or b"__metadata__" in start:
                    raise damaged(path, "it is empty" if not start else "its header can't be read")
                return None
            size = 8 + int.from_bytes(start[:8], "little")
            if _END <= size <= path.stat().st_size:
                return start + file.read(size - _AT)
    except FileNotFoundError:
        raise missing(path) from None
    raise damaged(path, "it ends within its header")


def _blanked(header: bytes) -> bytes:
    return header[:_AT] + _BLANK + header[_END:]


def _check_rows(path: Path, header: dict[str, Any], start: int, unsettled: Collection[int]) -> None:
    """Check the rows that are not zero, in a file whose data begin at ``start``."""
    import numpy as np

    data, rows = np.memmap(path, np.uint8, "r")[start:], header[CHECKSUMS]["shape"][0]
    places = dict(zip(header, _places(header), strict=True))
    found = {
        name: data[slice(*place)].reshape(rows, (place[1] - place[0]) // rows)
        for name, place in places.items()
    }
    is_written = np.zeros(rows, bool)
    with path.open("rb") as file:
        for part in stored_parts(file.fileno()):
            for name, values in found.items():
                some = _rows_within(part, start + places[name][0], values.shape)
                is_written[some] |= values[some].any(axis=1)
    stated = found.pop(CHECKSUMS).view(np.int64)[:, 0]
    for row in np.flatnonzero(is_written).tolist():
        parts = [values[row].data for values in found.values()]
        if row not in unsettled and row_checksum(parts) != stated[row]:
            raise damaged(path, f"the checksum of row {row} does not match")


def _rows_within(part: tuple[int, int], start: int, shape: tuple[int, ...]) -> slice:
    """The rows of a tensor, which begins at ``start``, that have a byte in a part of the file."""
    rows, size = shape
    first, last = max(part[0] - start, 0), min(part[1] - start, rows * size)
    return slice(first // size, -(-last // size)) if first < last else slice(0)


def stored_parts(file: int) -> Iterator[tuple[int, int]]:
    """Where each part of an open file begins and ends that takes room; zeros lie between them."""
    end = 0
    while True:
        try:
            start = os.lseek(file, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return  # nothing after this takes room
        end = os.lseek(file, start, os.SEEK_HOLE)
        yield start, end


def dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by dotted names.

    >>> dotted({"a": {"b": 1}, "c": [2]})
    {'a.b': 1, 'c': [2]}
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        is_nested = isinstance(value, Mapping)
        flat |= dotted(value, f"{prefix}{key}.") if is_nested else {prefix + key: value}
    return flat
