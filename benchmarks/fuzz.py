"""Mutated input: whatever is read gives a result or an InputError, within a second of CPU time.

    make fuzz                                            10,000 mutations of each kind
    python -m benchmarks.fuzz --kinds run --count 500    of one kind
    python -m benchmarks.fuzz --kinds run --only 123     one mutation again, with its traceback

A mutation flips bits, cuts the end off, or puts another value into a file that is read as JSON or
TOML; then a file of a run gets the right checksum, so that what is behind it is tried, too. Of the
kind "damage" are bits and ends of a run's files that `fedtailor check` must notice. A mutation
depends on the seed, the kind and its number alone. The script prints every traceback and every hang
once, with the number of the mutation, and exits with 1 if there is one. It counts values of another
type that were accepted without a word, by their place.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedtailor.errors import InputError
from fedtailor.run_format import checksum, seal_json

KINDS = ("experiment", "wire", "run", "trained", "store", "damage")
SECONDS = 1.0  # of CPU time for one mutation

_PLACES = 3  # of accepted values that are printed by kind
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3.5, -0.0, 10**9, 2**31, 2**63, 10**40, 1e308, -1e308,
    float("nan"), float("inf"), "", "x", "0", "../x", "a\0b", "\x1b[2J", "\ud800", "none",
    999 * "x", [], {}, [1], ["x"], [[]], {"x": 1}, {"": {}}, [None],
)  # fmt: skip


@dataclass(frozen=True)
class Change:
    """What was changed: the ``place`` in the file, and the types before and after; else how."""

    place: str
    types: str = ""

    @property
    def is_of_another_type(self) -> bool:
        """Whether a value was replaced by one of another type."""
        before, _, after = self.types.partition(" -> ")
        return before != after and {before, after} != {"int", "float"}


class Hang(BaseException):
    """A mutation took more than its time; no handler of exceptions catches it."""


def flipped(rng: random.Random, content: bytes) -> tuple[bytes, Change]:
    """Return the content with one to eight bits flipped."""
    changed = bytearray(content)
    for _ in range(rng.randint(1, 8) if changed else 0):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed), Change("bits")


def cut(rng: random.Random, content: bytes) -> tuple[bytes, Change]:
    """Return the content without its end."""
    return content[: rng.randrange(len(content) + 1)], Change("end")


def swapped(rng: random.Random, value: Any) -> tuple[Any, Change]:
    """Return a copy of plain values in which one is replaced, removed or added."""
    places = list(_places(value))
    if not places:
        return rng.choice(_VALUES), Change("all", f"{type(value).__name__} -> ?")
    path = rng.choice(places)
    changed = copy.deepcopy(value)
    parent = changed
    for key in path[:-1]:
        parent = parent[key]
    old, way = parent[path[-1]], rng.randrange(8)
    name = ".".join("*" if isinstance(key, int) else key for key in path)
    if way == 0:
        del parent[path[-1]]
        return changed, Change(f"{name} removed")
    if way == 1 and isinstance(parent, list):
        parent.insert(path[-1], old)
        return changed, Change(f"{name} twice")
    if way == 1:
        parent["unknown"] = rng.choice(_VALUES)
        return changed, Change("unknown key")
    if way == 2 and isinstance(old, int | float) and not isinstance(old, bool):
        new: Any = rng.choice([-old, old + 1, old * 1000, old / 3, str(old)])
    else:
        new = copy.deepcopy(rng.choice(_VALUES))
    parent[path[-1]] = new
    return changed, Change(name, f"{type(old).__name__} -> {type(new).__name__}")


def mutated(rng: random.Random, content: bytes, suffix: str) -> tuple[bytes, Change]:
    """Return the bytes of a file changed in one way; ``suffix`` says how values are written."""
    if suffix not in (".json", ".jsonl") or rng.random() < 0.3:
        return rng.choice([flipped, cut])(rng, content)
    if suffix == ".json":
        value, change = swapped(rng, json.loads(content))
        return json.dumps(value).encode(), change
    lines = content.splitlines()
    if not lines:
        return b"x", Change("line")
    at = rng.randrange(len(lines))
    value, change = swapped(rng, json.loads(lines[at]))
    lines[at] = json.dumps(value).encode()
    return b"".join(line + b"\n" for line in lines), change


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, one in inner if isinstance(value, dict | list) else ():
        yield (*path, key)
        if isinstance(one, dict | list):
            yield from _places(one, (*path, key))


Attempt = Callable[[random.Random], Change]


def experiments(folder: Path) -> Attempt:
    """Read mutated experiment files."""
    from fedtailor.runs import builtin
    from fedtailor.runs.experiment import load, parse, read_toml

    files = [path.read_bytes() for path in builtin.experiments().values()]
    file = folder / "mutated.toml"

    def attempt(rng: random.Random) -> Change:
        content = rng.choice(files)
        if rng.random() < 0.6:
            known = tomllib.loads(content.decode())
            value, change = swapped(
                rng, {k: known[k] for k in known if k not in ("presets", "tune")}
            )
            _read(lambda: parse(value).as_dict())
            return change
        content, change = rng.choice([flipped, cut])(rng, content)
        file.write_bytes(content)
        _read(lambda: (load(file).as_dict(), read_toml(file)))
        return change

    return attempt


def wire(folder: Path) -> Attempt:
    """Unpack mutated messages; the checksum of most of them is right."""
    import torch
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    from fedtailor.flower import codec, messages
    from fedtailor.params import encode

    tensors = {"w": torch.randn(3, 2), "b": torch.zeros(2, dtype=torch.bfloat16)}
    metrics = (messages.MetricValues((0.5, None)),) * 2
    sums = ((1.5, 3, 4), (2.5, 1, 4))
    results = (
        messages.ClientReply(0, payload=0, loss=0.5),
        messages.ClientReply(1, sums=sums, metrics=metrics),
        messages.ClientReply(2, error="no data", diverged=True),
    )
    head, example = messages.RoundReply, asdict(messages.RoundReply("r", 3, "train", results))
    limits = codec.Limits(1 << 16, 4, 1 << 16)
    text, data = json.dumps(example), encode(tensors)

    def attempt(rng: random.Random) -> Change:
        kind, names, one, changed = head.__name__, json.dumps([list(tensors)]), text, data
        way = rng.randrange(4)
        if way == 0:
            value, change = swapped(rng, example)
            one = json.dumps(value)
        elif way == 1:
            changed, change = rng.choice([flipped, cut])(rng, data)
        elif way == 2:
            value, change = swapped(rng, [list(tensors)])
            names = json.dumps(value)
        else:
            raw, change = rng.choice([flipped, cut])(rng, one.encode())
            one = raw.decode("utf-8", "surrogateescape" if rng.random() < 0.1 else "replace")
        texts = [kind, one, names]
        try:
            texts.append(codec._checksum(texts, [changed]) if rng.random() < 0.9 else "0")
        except UnicodeEncodeError:
            texts.append("0")
        about: Any = {"schema": codec.SCHEMA, **dict(zip(codec._TEXTS, texts, strict=True))}
        arrays = {"0": Array("uint8", (len(changed),), "safetensors", changed)}
        content = RecordDict({"about": ConfigRecord(about), "payloads": ArrayRecord(arrays)})
        _read(lambda: codec.unpack(content, head, limits))
        return replace(change, place=f"{('head', 'tensors', 'names', 'head')[way]} {change.place}")

    return attempt


def run_directories(folder: Path, run: Path | None = None) -> Attempt:
    """Compare a run, a new one if none is given, of which one text file is mutated."""
    from fedtailor.report import compare

    out = small_run(folder) if run is None else run
    files = [p for p in sorted(out.rglob("*")) if p.suffix in (".json", ".jsonl")]

    def attempt(rng: random.Random) -> Change:
        with _MutatedFile(rng, rng.choice(files), out) as change:
            _read(lambda: (compare([out]), compare([out], as_json=True)))
        return change.change

    return attempt


def trained(folder: Path) -> Attempt:
    """Open the models of a run of which one file is mutated, as predictions and exports do."""
    from fedtailor.runs.trained import open_trained

    out = small_run(folder)
    files = [p for p in sorted(out.rglob("*")) if p.suffix in (".json", ".safetensors")]

    def attempt(rng: random.Random) -> Change:
        with _MutatedFile(rng, rng.choice(files), out) as change:
            _read(lambda: open_trained(out, "fedsdg").client_state(1))
        return change.change

    return attempt


def stores(folder: Path) -> Attempt:
    """Read rows of a mutated store of private states."""
    import torch

    from fedtailor.engine.row_file import RowFile

    row = {"w": torch.zeros(3, 2), "n": torch.zeros((), dtype=torch.int64)}
    path = folder / "private.safetensors"
    RowFile(path, 5, row).write(0, {"w": torch.randn(5, 3, 2), "n": torch.arange(5)})
    content = path.read_bytes()

    def attempt(rng: random.Random) -> Change:
        changed, change = rng.choice([flipped, cut])(rng, content)
        path.write_bytes(changed)
        # an end that is missing is an error of the disk, which the command line tells in a line
        _read(lambda: [RowFile(path, 5, row).read(k) for k in range(5)], (InputError, OSError))
        return change

    return attempt


def damage(folder: Path) -> Attempt:
    """Check a run of which one file is damaged."""
    from fedtailor.runs.check import check

    out = small_run(folder)
    files = [p for p in sorted(out.rglob("*")) if p.suffix in (".json", ".jsonl", ".safetensors")]

    def attempt(rng: random.Random) -> Change:
        path = rng.choice(files)
        before = path.read_bytes()
        content, change = rng.choice([flipped, cut])(rng, before)
        if content == before or (path.suffix == ".json" and _same_values(content, before)):
            return change
        path.write_bytes(content)
        try:
            problems = check(out).problems
        finally:
            path.write_bytes(before)
        if not problems:
            raise AssertionError(f"damage of {path.relative_to(out)} was not noticed")
        raise RefusedError

    return attempt


def _same_values(content: bytes, before: bytes) -> bool:
    """Whether only blanks or the like of a JSON file differ."""
    try:
        return bool(json.loads(content) == json.loads(before))
    except (ValueError, RecursionError):
        return False


def small_run(folder: Path) -> Path:
    """Write a run of two methods on made-up digits, with private states; returns its directory."""
    import fedtailor as ft

    out = folder / "run"
    if not out.exists():
        experiment = ft.Experiment(
            methods={"fedsdg": ft.FedSDG(rank=2), "fedavg": ft.FedAvg()},
            name="fuzz",
            rounds=2,
            data=ft.DataConfig(name="digits", limit=150),
            split=ft.SplitConfig(3, "dirichlet", alpha=1.0, min_examples=5),
            model=ft.ModelConfig("lenet", pretrained=False, image_size=16, width=0.2,
                                 targets=("hidden1", "hidden2")),
            local=ft.LocalConfig(batch_size=8, steps=1),
            engine=ft.EngineConfig(executor="sequential"),
        )  # fmt: skip
        ft.run(experiment, out, summary=False)
    return out


class _MutatedFile:
    """A file of a run that is mutated for a while. One with another value has the right checksum,
    and the lengths of logs are those of the new one."""

    def __init__(self, rng: random.Random, path: Path, out: Path) -> None:
        self.path, self.before = path, {path: path.read_bytes()}
        content, change = mutated(rng, self.before[path], path.suffix)
        has_values = change.place not in ("bits", "end")
        if path.suffix == ".json" and has_values:
            value = json.loads(content)
            value.pop("checksum", None)
            content = seal_json(value)
        path.write_bytes(content)
        commit = path.with_name("commit.json")
        if path.suffix == ".jsonl" and has_values:
            self.before[commit] = commit.read_bytes()
            about = json.loads(self.before[commit])
            about.pop("checksum", None)
            about["bytes"][path.stem] = len(content)
            if path.stem in about.get("checksums", {}):
                about["checksums"][path.stem] = checksum(content)
            commit.write_bytes(seal_json(about))
        parts = path.relative_to(out).parts
        name = path.name if parts[0] != "partitions" else f"partitions/{path.name}"
        self.change = replace(change, place=f"{name} {change.place}")

    def __enter__(self) -> _MutatedFile:
        return self

    def __exit__(self, *_: object) -> None:
        for path, content in self.before.items():
            path.write_bytes(content)


class RefusedError(Exception):
    """The input was refused in one line."""


def _read(action: Callable[[], Any], allowed: tuple[type[Exception], ...] = (InputError,)) -> None:
    try:
        action()
    except allowed as error:
        if "\n" in str(error):
            raise AssertionError(f"a message of several lines: {error}") from error
        raise RefusedError from None


_START: dict[str, Callable[[Path], Attempt]] = {
    "experiment": experiments,
    "wire": wire,
    "run": run_directories,
    "trained": trained,
    "store": stores,
    "damage": damage,
}


def fuzz(kind: str, numbers: Sequence[int], seed: int, seconds: float, show: bool = False) -> int:
    """Try mutations of one kind, print what was found, and return how many findings there are."""
    found: dict[str, tuple[int, str]] = {}
    accepted: Counter[str] = Counter()
    told = done = 0
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    attempt = _START[kind](folder)
    signal.signal(signal.SIGPROF, _hang)
    end = time.monotonic() + seconds
    for number in numbers:
        if time.monotonic() > end:
            break
        done += 1
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            change = attempt(random.Random(f"{seed} {kind} {number}"))
            if change.is_of_another_type:
                accepted[f"{change.place}: {change.types}"] += 1
        except RefusedError:
            told += 1
        except (Exception, Hang) as error:  # noqa: BLE001
            signal.setitimer(signal.ITIMER_PROF, 0)
            frames = [f"{f.filename}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
            where = next((f for f in reversed(frames) if "/fedtailor/" in f), frames[-1])
            place = f"{type(error).__name__} {where}"
            found.setdefault(place, (number, str(error)[:200]))
            if show:
                traceback.print_exception(error)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    shutil.rmtree(folder)
    print(f"{kind}: {done} mutations, {told} refused in a line, {len(found)} findings")
    for place, (number, text) in found.items():
        print(f"  mutation {number}: {place}: {text}")
    print(f"  {accepted.total()} values of another type accepted, at {len(accepted)} places")
    for text, count in accepted.most_common(None if show else 10 * _PLACES):
        print(f"  accepted {count} times: {text}")
    sys.stdout.flush()
    return len(found)


def _hang(*_: object) -> None:
    raise Hang(f"more than {SECONDS} seconds of CPU time")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--count", type=int, default=10_000, help="mutations of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="at most, a kind")
    parser.add_argument("--only", type=int, help="the number of one mutation")
    options = parser.parse_args()
    numbers = range(options.count) if options.only is None else [options.only]
    show = options.only is not None
    findings = [fuzz(k, numbers, options.seed, options.seconds, show) for k in options.kinds]
    sys.exit(1 if sum(findings) else 0)


if __name__ == "__main__":
    main()
