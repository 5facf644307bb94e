"""Fuzzing that is guided by coverage: input that reaches new lines is changed further.

    make fuzz-guided                                          a minute for each kind
    python -m benchmarks.guided_fuzz --kinds head --seconds 600

It needs atheris, which ``make`` installs; there are no builds of it for some platforms. Whatever
is read gives a result or an InputError. At anything else the input is kept below ``--keep``, and
the script exits with 1.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path

import atheris
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

_HERE = "--here"  # fuzz in this process
_SEEN = atheris.instrument_imports(include=["fedtailor"], enable_loader_override=False)

with _SEEN if _HERE in sys.argv else nullcontext():
    import torch

    from fedtailor import params
    from fedtailor.errors import InputError
    from fedtailor.flower import codec, messages
    from fedtailor.runs import builtin
    from fedtailor.runs.experiment import load
    from fedtailor.store.committed import LOGS, read_commit
    from fedtailor.store.logs import read_log
    from fedtailor.store.records import Commit, EvaluationLine
    from fedtailor.store.row_file import RowFile

Kind = tuple[list[bytes], Callable[[bytes], object]]  # what it begins with, and who reads it
_TENSORS = {"w": torch.ones(3, 2), "b": torch.zeros(2, dtype=torch.bfloat16)}


def experiment(folder: Path) -> Kind:
    """Experiment files."""
    file = folder / "mutated.toml"

    def one(data: bytes) -> object:
        file.write_bytes(data)
        return load(file).as_dict()

    return [path.read_bytes() for path in builtin.experiments().values()], one


def head(folder: Path) -> Kind:
    """What a site's message says beside its tensors; the checksum is right."""
    results = (messages.ClientReply(0, payload=0, loss=0.5), messages.ClientReply(1, error="no"))
    begun = codec.pack(messages.RoundReply("r", 3, "train", results), [_TENSORS])

    def one(data: bytes) -> object:
        return _unpacked(begun, {codec._TEXTS[1]: data.decode("utf-8", "replace")})

    return [str(begun["about"][codec._TEXTS[1]]).encode()], one


def payload(folder: Path) -> Kind:
    """The tensors of a site's message; the checksum is right."""
    results = (messages.ClientReply(0, payload=0, loss=0.5),)
    begun = codec.pack(messages.RoundReply("r", 3, "train", results), [_TENSORS])
    return [params.encode(_TENSORS)], lambda data: _unpacked(begun, {}, data)


def _unpacked(begun: RecordDict, texts: Mapping[str, str], payload: bytes | None = None) -> object:
    about = {name: texts.get(name, str(begun["about"][name])) for name in codec._TEXTS[:3]}
    (array,) = begun["payloads"].values()
    data = array.data if payload is None else payload
    stated = codec._checksum([*about.values()], [data])
    now = ConfigRecord({"schema": codec.SCHEMA, **about, codec._TEXTS[3]: stated})
    arrays = ArrayRecord({"0": Array(array.dtype, (len(data),), array.stype, data)})
    limits = codec.Limits(1 << 16, 4, 1 << 16)
    return codec.unpack(RecordDict({"about": now, "payloads": arrays}), messages.RoundReply, limits)


def commit(folder: Path) -> Kind:
    """The ``commit.json`` of a run; it may do without a checksum."""
    about = {
        "round": 2, "rounds": 3, "finished": False, "diverged": None, "stopped": False,
        "bytes": dict.fromkeys(LOGS, 9), "best": {"personal": {"round": 1, "validation": 0.5}},
    }  # fmt: skip

    def one(data: bytes) -> object:
        (folder / "commit.json").write_bytes(data)
        return read_commit(folder)

    return [json.dumps(about).encode()], one


def log(folder: Path) -> Kind:
    """The results of a run."""
    line = EvaluationLine(
        1, "personal", "test", [0, 1], [3, 4], [0.5, None], [0.5, None], {"f1": [1]}
    )

    def one(data: bytes) -> object:
        (folder / "clients.jsonl").write_bytes(data)
        return read_log(
            EvaluationLine, folder / "clients.jsonl", Commit(1, 2, False, {"clients": len(data)})
        )

    return [json.dumps(asdict(line)).encode() + b"\n"], one


def store(folder: Path) -> Kind:
    """Private states of a run, whose header has no checksum."""
    file, row = folder / "private.safetensors", {"w": torch.zeros(3, 2), "n": torch.zeros(())}
    whole = params.encode({name: torch.ones(4, *value.shape) for name, value in row.items()})

    def one(data: bytes) -> object:
        file.write_bytes(data)
        return [RowFile(file, 4, row).read(client) for client in range(4)]

    return [whole], one


KINDS = {kind.__name__: kind for kind in (experiment, head, payload, commit, log, store)}


def run(kind: str, seconds: int, keep: Path) -> None:
    """Fuzz in this process, until the time is over or something is found; it never returns."""
    folder = Path(tempfile.mkdtemp(prefix="guided-fuzz-"))
    begins, read = KINDS[kind](folder)
    corpus = folder / "corpus"
    corpus.mkdir()
    for number, content in enumerate(begins):
        (corpus / str(number)).write_bytes(content)

    def one(data: bytes) -> None:
        with suppress(InputError):
            read(data)

    flags = {
        "max_total_time": seconds, "timeout": 5, "rss_limit_mb": 4096, "print_final_stats": 1,
        "artifact_prefix": f"{keep}/{kind}-",
    }  # fmt: skip
    atheris.Setup([kind, *(f"-{name}={v}" for name, v in flags.items()), str(corpus)], one)
    atheris.Fuzz()


def main() -> None:
    """Run the command line: one process for each kind."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seconds", type=int, default=60, help="for each kind")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-findings"))
    parser.add_argument(_HERE, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.keep.mkdir(exist_ok=True)
    if options.here:
        run(options.kinds[0], options.seconds, options.keep)
    again = [sys.executable, "-m", "benchmarks.guided_fuzz", _HERE]
    rest = ["--seconds", str(options.seconds), "--keep", str(options.keep)]
    codes = []
    for kind in options.kinds:
        done = subprocess.run([*again, "--kinds", kind, *rest], capture_output=True, text=True)
        codes.append(done.returncode)
        tried = re.search(r"number_of_executed_units: (\d+)", done.stderr)
        print(f"{kind}: {tried[1] if tried else 'no'} inputs, exit code {done.returncode}")
        if done.returncode:
            print(done.stderr[-3000:])
    if not any(options.keep.iterdir()):
        options.keep.rmdir()
    sys.exit(any(codes))


if __name__ == "__main__":
    main()
