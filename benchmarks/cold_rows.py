"""The time to read a cohort's private rows: cold, after `RowFile.prefetch`, and warm.

A file of 300 rows is written and its pages are dropped from the kernel's cache; then the rows of
20 clients, drawn at random, are read. Wall time: what is waited for is the disk.

    python benchmarks/cold_rows.py

writes the table to benchmarks/results/cold_rows-cpu.md.
"""

from __future__ import annotations

import argparse
import datetime
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fedtailor.store.row_file import RowFile

OUT = Path(__file__).parent / "results" / "cold_rows-cpu.md"
ROWS, COHORT, REPEATS, PAUSE = 300, 20, 5, 0.5


def milliseconds(work: Callable[[], object]) -> float:
    """Wall time of ``work``."""
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


def measure(tensors: int, scalars: int) -> dict[str, float]:
    """Median milliseconds of each step for a cohort whose rows are so many tensors of so many."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="fedtailor-rows-") as folder:
        path = Path(folder) / "rows.safetensors"
        file = RowFile(path, ROWS, {f"t{i}": torch.zeros(scalars) for i in range(tensors)})
        row = {f"t{i}": torch.ones(1, scalars) for i in range(tensors)}
        for index in range(ROWS):
            file.write(index, row)
        file.sync()
        descriptor = os.open(path, os.O_RDONLY)
        rng = random.Random(0)
        for _ in range(REPEATS):
            for prefetched in (False, True):
                clients = rng.sample(range(ROWS), COHORT)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                steps = [("cold", file.read), ("warm", file.read)]
                if prefetched:
                    steps = [("prefetch", file.prefetch), ("after prefetch", file.read)]
                for name, step in steps:
                    took = milliseconds(lambda s=step, at=clients: [s(k) for k in at])
                    found.setdefault(name, []).append(took)
                    time.sleep(PAUSE)  # a client trains
            took = milliseconds(lambda at=clients: [file.write(k, row) for k in at] + [file.sync()])
            found.setdefault("write and sync", []).append(took)
        os.close(descriptor)
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    """Measure two shapes of a private state, print the table and write it."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    shapes = {"72 tensors, 885 kB": (72, 3072), "8 tensors, 102 kB": (8, 3200)}
    results = {name: measure(*shape) for name, shape in shapes.items()}
    steps = list(next(iter(results.values())))
    lines = [
        f"- {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC, "
        f"`python benchmarks/cold_rows.py`, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        f"- median milliseconds for the rows of {COHORT} clients, {REPEATS} repeats",
        "",
        "| a client's state | " + " | ".join(steps) + " |",
        "|---" + "|---:" * len(steps) + "|",
        *(
            f"| {name} | " + " | ".join(f"{took[step]:.1f}" for step in steps) + " |"
            for name, took in results.items()
        ),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    OUT.write_text(f"# Reading a cohort's private rows\n\n{text}")


if __name__ == "__main__":
    main()
