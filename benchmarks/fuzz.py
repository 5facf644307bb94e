"""Mutated input: whatever is read gives a result or an InputError, within a second of CPU time.

    make fuzz                                            10,000 mutations of each kind
    python -m benchmarks.fuzz --kinds run --count 500    of one kind
    python -m benchmarks.fuzz --kinds run --only 123     one mutation again, with its traceback

A mutation flips bits, cuts the end off, or puts another value into a file that is read as JSON or
TOML; then a file of a run gets the right checksum, so that what is behind it is tried, too. Of the
kind "damage" are bits and ends of a run's files that `fedtailor check` must notice. A "plan" is an
experiment that goes through all checks of ``fedtailor run --dry-run``. An "answer" is a site's
message that the server reads in the middle of a round, which goes on; a "request" is a message of
the server that a site works on. "Images" are pictures of every mode and depth, whose mean must be
right. "Names" go through every output, which must give them back. A mutation depends on the seed,
the kind and its number alone. The script prints every traceback and every hang once, with the
number of the mutation, and exits with 1 if there is one. It counts values of another type that were
accepted without a word, by their place.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedtailor.errors import InputError
from fedtailor.store.format import checksum, seal_json

from .fuzz_code import own_code
from .fuzz_formats import formats
from .fuzz_images import images
from .fuzz_messages import answers, requests, wire
from .fuzz_models import model_folders
from .fuzz_names import names
from .fuzz_test_files import test_files
from .mutations import (
    Attempt,
    Change,
    Hang,
    RefusedError,
    cut,
    flipped,
    mutated,
    read,
    small_experiment,
    swapped,
)

SECONDS = 1.0  # of CPU time for one mutation

_PLACES = 3  # of accepted values that are printed by kind


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
            read(lambda: parse(value).as_dict())
            return change
        content, change = rng.choice([flipped, cut])(rng, content)
        file.write_bytes(content)
        read(lambda: (load(file).as_dict(), read_toml(file)))
        return change

    return attempt


_PARTS: tuple[dict[str, Any], ...] = (  # of experiments, each there in a third of the mutations
    {"cohort": {"size": 2, "novel": 1, "max_share": 0.6, "max_norm": 9.0}},
    {"evaluate": {"metrics": ["macro_f1"], "confusion": True, "select": "macro_f1", "clients": 2}},
    {"attack": {"kind": "sign-flip", "clients": [1], "strength": 2.0, "last_round": 2}},
    {"faults": {"deadline": 9.0, "machines": [{"share": 1.0, "flops_per_second": 1e9}],
                "by_client": [{"clients": [0], "drop_before": 0.5}]}},
    {"public": {"name": "digits", "skip": 150, "limit": 20}},
    {"schedule": {"name": "cosine", "warmup_rounds": 1}},
    {"engine": {"clients_per_step": 2, "processes": 2, "precision": "bf16"}},
)  # fmt: skip


def plans(folder: Path, names: Sequence[str] | None = None) -> Attempt:
    """Check mutated experiments with the data and the model, as ``fedtailor run --dry-run`` does.

    They have one of the methods with these ``names``, of all if none are given. What is wrong with
    a file, the command line tells in a line, too.
    """
    import datasets  # noqa: F401

    from fedtailor.methods import METHODS
    from fedtailor.models import ModelConfig, load_tokenizer
    from fedtailor.runs.experiment import parse
    from fedtailor.runs.run import dry_run

    os.environ["HF_HUB_OFFLINE"] = "1"
    load_tokenizer(ModelConfig())  # so that no mutation waits for imports
    whole = small_experiment({name: METHODS[name]() for name in names or METHODS}).as_dict()
    base, methods = {**whole, "rounds": 7}, whole["methods"]
    for method in methods:
        with suppress(InputError):
            dry_run(parse({**base, "methods": [method]}), folder / "new")

    def attempt(rng: random.Random) -> Change:
        method = rng.choice(methods)
        robust = {**method["robust"], "rule": rng.choice(["none", "none", "mda", "median"])}
        value = {**base, "methods": [{**method, "robust": robust}]}
        for part in _PARTS:
            if rng.random() < 1 / 3:
                value |= {name: {**value[name], **fields} for name, fields in part.items()}
        value, change = swapped(rng, value)

        def check() -> None:
            start = dry_run(parse(value), folder / "new")
            start.lines(), start.as_json()

        read(check, (InputError, OSError))
        return change

    return attempt


def run_directories(folder: Path, run: Path | None = None) -> Attempt:
    """Compare a run, a new one if none is given, of which one text file is mutated."""
    from fedtailor.report import compare

    out = small_run(folder) if run is None else run
    files = [p for p in sorted(out.rglob("*")) if p.suffix in (".json", ".jsonl")]

    def attempt(rng: random.Random) -> Change:
        with _MutatedFile(rng, rng.choice(files), out) as change:
            read(lambda: (compare([out]), compare([out], as_json=True)))
        return change.change

    return attempt


def trained(folder: Path) -> Attempt:
    """Open the models of a run of which one file is mutated, as predictions and exports do."""
    from fedtailor.runs.trained import open_trained

    out = small_run(folder)
    files = [p for p in sorted(out.rglob("*")) if p.suffix in (".json", ".safetensors")]

    def attempt(rng: random.Random) -> Change:
        with _MutatedFile(rng, rng.choice(files), out) as change:
            read(lambda: open_trained(out, "fedsdg").client_state(1))
        return change.change

    return attempt


def stores(folder: Path) -> Attempt:
    """Read rows of a mutated store of private states."""
    import torch

    from fedtailor.store.row_file import RowFile

    row = {"w": torch.zeros(3, 2), "n": torch.zeros((), dtype=torch.int64)}
    path = folder / "private.safetensors"
    RowFile(path, 5, row).write(0, {"w": torch.randn(5, 3, 2), "n": torch.arange(5)})
    content = path.read_bytes()

    def attempt(rng: random.Random) -> Change:
        changed, change = rng.choice([flipped, cut])(rng, content)
        path.write_bytes(changed)
        # an end that is missing is an error of the disk, which the command line tells in a line
        read(lambda: [RowFile(path, 5, row).read(k) for k in range(5)], (InputError, OSError))
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
        methods = {"fedsdg": ft.FedSDG(rank=2), "fedavg": ft.FedAvg()}
        ft.run(small_experiment(methods), out, summary=False)
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


Start = Callable[[Path], Attempt]

_START: dict[str, Start] = {
    "experiment": experiments,
    "plan": plans,
    "wire": wire,
    "answer": answers,
    "request": requests,
    "run": run_directories,
    "trained": trained,
    "store": stores,
    "damage": damage,
    "images": images,
    "models": model_folders,
    "names": names,
    "code": own_code,
    "test-files": test_files,
    "formats": formats,
}


def fuzz(kind: str, numbers: Sequence[int], seed: int, seconds: float, show: bool = False) -> int:
    """Try mutations of one kind, print what was found, and return how many findings there are."""
    found: dict[str, tuple[int, str]] = {}
    accepted: Counter[str] = Counter()
    told = done = 0
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    said = io.StringIO()  # what is tried may print
    with redirect_stdout(said), redirect_stderr(said):
        attempt = _START[kind](folder)
    signal.signal(signal.SIGPROF, _hang)
    end = time.monotonic() + seconds
    for number in numbers:
        if time.monotonic() > end:
            break
        done += 1
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            with redirect_stdout(said), redirect_stderr(said):
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
                print(said.getvalue())
                traceback.print_exception(error)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        said.truncate(0)
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
    parser.add_argument("--kinds", nargs="+", choices=_START, default=_START)
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
