"""fedtailor beside bare PyTorch loops and other libraries, on the same work, on CPU.

    python -m benchmarks.peers [cnn] [lora] [--install]

runs each contender several times, in turns, and writes benchmarks/results/peers-cpu.jsonl and .md.
Other libraries have environments of their own in benchmarks/.envs, which ``--install`` makes from
benchmarks/peers/NAME.txt; a library whose environment isn't there is left out.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
from benchmarks.harness import (
    NO_BF16,
    Contender,
    ContenderError,
    Record,
    circumstances,
    has_bf16,
    in_turns,
    markdown,
    run,
    spread,
)
from benchmarks.harness import write as write_results

from fedtailor.engine.config import EngineConfig

from . import cnn

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parent / ".envs"
OUT = HERE.parent / "results" / "peers-cpu"
LIBRARIES = ("pfl", "flower", "fedlab", "blazefl")
SPAN = 20  # rounds of a run, for the time with start-up
EXECUTORS: tuple[str, ...] = get_args(get_type_hints(EngineConfig)["executor"])
OURS = tuple((executor, precision) for executor in EXECUTORS for precision in ("fp32", "bf16"))

HEADER = (
    "", "s a round", "of the first", "CPU s a round", "of the first", f"s for {SPAN} rounds",
    "peak MB",
)  # fmt: skip

Results = Mapping[str, Sequence[Record]]  # by contender, one a repeat


def install(library: str) -> None:
    """Make a library's environment, unless it is there as its requirements say."""
    if _installed(library):
        return
    print(f"installing {library}", file=sys.stderr)
    folder, wanted = ENVIRONMENTS / library, HERE / f"{library}.txt"
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    pip = [str(folder / "bin" / "pip"), "install", "-q", "-r", str(wanted)]
    if library == "blazefl":  # version 2 asks for Python 3.12 and needs no more than 3.11 has
        pip.append("--ignore-requires-python")
    subprocess.run(pip, check=True)
    (folder / wanted.name).write_text(wanted.read_text())


def _installed(library: str) -> bool:
    there = ENVIRONMENTS / library / f"{library}.txt"
    return there.is_file() and there.read_text() == (HERE / there.name).read_text()


def cnn_contenders(threads: int) -> list[Contender]:
    """The bare loop, fedtailor by executor, and the libraries that are installed; those of one
    process may use ``threads``, the others one in each of two processes."""
    wanted = [
        ("bare loop", "bare", 1, "fp32", ""),
        ("bare loop, 2 processes", "bare", 2, "fp32", ""),
        ("bare loop, 2 processes, bf16", "bare", 2, "bf16", ""),
        *((_ours(e, p), "ours", 1, p, e) for e, p in OURS),
        ("pfl-research", "pfl", 1, "fp32", ""),
        ("pfl-research, 2 workers", "pfl", 2, "fp32", ""),
        ("pfl-research, 2 workers, bf16", "pfl", 2, "bf16", ""),
        ("Flower, 2 actors", "flower", 2, "fp32", ""),
        ("FedLab, serial", "fedlab", 1, "fp32", ""),
        ("BlazeFL, 2 threads", "blazefl", 2, "fp32", "threads"),
        ("BlazeFL, 2 processes", "blazefl", 2, "fp32", "processes"),
    ]
    contenders = []
    for name, module, workers, precision, mode in wanted:
        if module in LIBRARIES and not _installed(module):
            continue
        if precision == "bf16" and not has_bf16():
            continue
        own = ENVIRONMENTS / module / "bin" / "python"
        command = (
            *_python(str(own) if module in LIBRARIES else sys.executable, module),
            *("--workers", str(workers), "--precision", precision, "--mode", mode),
        )
        contenders.append(Contender(name, command, 1 if workers > 1 else threads))
    return contenders


def lora_contenders(threads: int) -> list[Contender]:
    """PEFT in plain loops, and fedtailor by executor."""
    wanted = [
        ("PEFT, padded to 64", "peft", "fp32"),
        ("PEFT, padded to the batch's longest", "trimmed", "fp32"),
        ("PEFT, padded, a copy a client", "deepcopy", "fp32"),
        ("centralised, padded", "centralised", "fp32"),
        *((_ours(e, p), f"ours-{e}", p) for e, p in OURS),
    ]
    return [
        Contender(
            name,
            (*_python(sys.executable, "lora"), "--mode", mode, "--precision", precision),
            threads,
        )
        for name, mode, precision in wanted
        if precision == "fp32" or has_bf16()
    ]


def _python(python: str, module: str) -> tuple[str, ...]:
    return python, "-W", "ignore", "-m", f"benchmarks.peers.{module}"


def _ours(executor: str, precision: str) -> str:
    return f"fedtailor, {executor}{', bf16' if precision == 'bf16' else ''}"


def measure(
    contenders: Sequence[Contender], cohort: int, options: argparse.Namespace
) -> tuple[Results, dict[str, Any], list[str]]:
    """What each contender found, and what it trained in its last repeat: a list of arrays, or one
    vector. One that fails is left out, and said to be."""
    only = options.only
    chosen = [c for c in contenders if not only or any(part in c.name for part in only)]
    results: dict[str, list[Record]] = defaultdict(list)
    trained: dict[str, Any] = {}
    failed: set[str] = set()
    for repeat, contender in in_turns(chosen, options.repeats):
        command = (*contender.command, "--rounds", str(options.rounds), "--cohort", str(cohort))
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = run(Contender(contender.name, command, contender.threads), Path(folder))
            except ContenderError as error:
                print(error, file=sys.stderr)
                failed.add(contender.name)
                continue
            for path in Path(folder).glob("found.np*"):
                arrays = np.load(path)
                trained[contender.name] = (
                    arrays if isinstance(arrays, np.ndarray) else [arrays[n] for n in arrays.files]
                )
        results[contender.name].append({"repeat": repeat, "threads": contender.threads, **found})
    names = [contender.name for contender in chosen if contender.name not in failed]
    return {name: results[name] for name in names}, trained, sorted(failed)


def rows(results: Results, last: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """A row a contender: times of a round, of `SPAN` rounds, memory; then the columns of
    ``last``."""
    base = next(iter(results.values()))
    table = []
    for name, repeats in results.items():
        wall, cpu = _rounds(repeats, "rounds_s"), _rounds(repeats, "rounds_cpu_s")
        spans = [
            r["seconds"] + (SPAN - 1 - len(r["rounds_s"])) * statistics.median(r["rounds_s"])
            for r in repeats
        ]
        table.append(
            [
                name,
                spread(wall),
                _ratio(wall, _rounds(base, "rounds_s")),
                spread(cpu),
                _ratio(cpu, _rounds(base, "rounds_cpu_s")),
                spread(spans, 1),
                spread([r["peak_mb"] for r in repeats], 0),
                *last[name],
            ]
        )
    return table


def _rounds(repeats: Sequence[Record], field: str) -> list[float]:
    return [value for repeat in repeats for value in repeat[field]]


def _ratio(values: Sequence[float], base: Sequence[float]) -> str:
    return f"{statistics.median(values) / statistics.median(base):.2f}"


def _versions(results: Results) -> str:
    """What each contender ran on, said once for those with the same."""
    by: dict[str, list[str]] = defaultdict(list)
    for name, repeats in results.items():
        by[", ".join(f"{p} {v}" for p, v in repeats[0]["versions"].items())].append(name)
    return "; ".join(f"{versions} ({', '.join(names)})" for versions, names in by.items())


def cnn_part(options: argparse.Namespace) -> tuple[str, list[Record]]:
    """Run, and tell: Markdown, and the records."""
    cnn.make()
    cohort = _scaled(cnn.COHORT, options)
    results, trained, failed = measure(cnn_contenders(options.threads), cohort, options)
    losses = {name: [f"{cnn.test_loss(trained[name]):.3f}"] for name in results}
    missing = [library for library in LIBRARIES if not _installed(library)]
    notes = [
        f"1000 clients x {cnn.EXAMPLES} examples, {cohort} a round, batches of {cnn.BATCH},"
        f" 1 epoch, SGD {cnn.LR}; a network of 2 convolutions, 1,626,442 parameters",
        f"test loss: of the model after {options.rounds} rounds; all start from the same "
        "parameters, each draws its own batches and dropout",
        _versions(results),
        *([f"left out, not installed: {', '.join(missing)}"] if missing else []),
        *([f"failed: {', '.join(failed)}"] if failed else []),
    ]
    table = markdown((*HEADER, "test loss"), rows(results, losses))
    text = "## FedAvg on a small convolutional network\n\n" + _listed(notes) + "\n" + table
    return text, _records("cnn", results)


def lora_part(options: argparse.Namespace) -> tuple[str, list[Record]]:
    """Run, and tell: Markdown, and the records."""
    cohort = _scaled(10, options)
    results, trained, failed = measure(lora_contenders(options.threads), cohort, options)
    first = next(iter(results))
    deviation = {name: _deviation(trained[name], trained[first]) for name in results}
    notes = [
        f"{cohort} clients x 4 steps a round, batches of 8 texts of 4 to 64 tokens (27 on "
        "average), Adam 0.001, LoRA of rank 8 and the head",
        "update: the round's change of all trained tensors, against that of the first row: norm of "
        "the difference over the norm, and cosine; centralised does other arithmetic",
        _versions(results),
        *([f"failed: {', '.join(failed)}"] if failed else []),
    ]
    table = markdown((*HEADER, "update differs by", "cosine"), rows(results, deviation))
    return "## LoRA on MiniLM-L6\n\n" + _listed(notes) + "\n" + table, _records("lora", results)


def _deviation(update: np.ndarray, base: np.ndarray) -> list[str]:
    a, b = update.astype(np.float64), base.astype(np.float64)
    norm = np.linalg.norm
    return [f"{norm(a - b) / norm(b):.1e}", f"{a @ b / norm(a) / norm(b):.4f}"]


def _scaled(cohort: int, options: argparse.Namespace) -> int:
    return max(1, round(cohort * options.scale))


def _records(work: str, results: Results) -> list[Record]:
    return [
        {"work": work, "contender": name, **repeat}
        for name, repeats in results.items()
        for repeat in repeats
    ]


def _listed(lines: Sequence[str]) -> str:
    return "".join(f"- {line}\n" for line in lines)


def main() -> None:
    """Run what is asked for, print the tables, write them and the records."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("work", nargs="*", choices=["cnn", "lora", []], help="default: both")
    parser.add_argument("--install", action="store_true", help="the other libraries, first")
    parser.add_argument("--only", nargs="*", default=[], help="parts of contenders' names")
    parser.add_argument("--rounds", type=int, default=5, help="of a repeat; the first isn't timed")
    parser.add_argument("--repeats", type=int, default=3, help="processes a contender")
    parser.add_argument("--scale", type=float, default=1.0, help="of the cohorts' sizes")
    parser.add_argument("--threads", type=int, default=2, help="of a contender of one process")
    parser.add_argument("--out", type=Path, default=OUT, help="without suffix")
    options = parser.parse_args()
    if options.install:
        for library in LIBRARIES:
            install(library)
    load = os.getloadavg()[0]
    parts = {"cnn": cnn_part, "lora": lora_part}
    done = [parts[work](options) for work in options.work or parts]
    command = shlex.join(["python", "-m", "benchmarks.peers", *sys.argv[1:]])
    notes = [
        *circumstances(command, load),
        f"{options.repeats} processes a contender, in turns, each of {options.rounds} rounds, the "
        f"first not timed; {options.threads} threads in one process, or one in each of two",
        "medians (first to third quartile); seconds are wall time, CPU seconds those of all the "
        "contender's processes: on a busy machine the latter say more",
        f"s for {SPAN} rounds: the whole process, start-up and end, with the rounds that were not "
        "run put in at the median; peak: proportional set sizes of all its processes, sampled",
        *([] if has_bf16() else [NO_BF16]),
    ]
    text = "\n".join(["# Beside bare loops and other libraries\n", _listed(notes)])
    text += "".join(f"\n{part}" for part, _ in done)
    print(text)
    write_results(options.out, text, [record for _, records in done for record in records])


if __name__ == "__main__":
    main()
