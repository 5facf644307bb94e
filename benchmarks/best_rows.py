"""The cost of keeping the private states of the best round: seconds and bytes of a store's commit.

10,000 clients, of whom 20 take part in a round. The store moves a round's rows to their places; if
a best round is kept, it copies the rows that it overwrites for the first time since. Each case is
measured with clients that have all trained before (a row to copy) and with clients that have not
(only a flag). Bytes are those handed to the kernel (Linux's wchar).

    python benchmarks/best_rows.py

writes the table to benchmarks/results/best_rows-cpu.md.
"""

from __future__ import annotations

import argparse
import datetime
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

import torch

from fedtailor.params import Params
from fedtailor.store.client_states import FileStates

OUT = Path(__file__).parent / "results" / "best_rows-cpu.md"
CLIENTS, COHORT, ROUNDS = 10_000, 20, 20


def written() -> int:
    """Bytes that this process has written so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


def one_round(store: FileStates, number: int, clients: list[int], row: Params) -> list[float]:
    """Milliseconds and megabytes of the commit."""
    store.begin(number)
    for client in clients:
        store.stage(client, row)
    store.sync()
    before, start = written(), time.perf_counter()
    store.commit()
    return [(time.perf_counter() - start) * 1e3, (written() - before) / 1e6]


def measure(scalars: int, *, trained: bool, best: bool) -> tuple[float, float]:
    """Medians of `one_round`, for rows of so many scalars, with or without a best round."""
    row, rng = {"w": torch.ones(scalars)}, random.Random(0)
    with tempfile.TemporaryDirectory(prefix="fedtailor-rows-") as folder:
        path = Path(folder) / "private.safetensors"
        store = FileStates(CLIENTS, lambda client: {"w": torch.zeros(scalars)}, path)
        if trained:
            one_round(store, 1, list(range(CLIENTS)), row)
        if best:
            store.keep(1)
        numbers = range(2, ROUNDS + 2)
        taken = [one_round(store, n, rng.sample(range(CLIENTS), COHORT), row) for n in numbers]
    milliseconds, megabytes = zip(*taken, strict=True)
    return statistics.median(milliseconds), statistics.median(megabytes)


def main() -> None:
    """Measure two sizes of a private state, print the table and write it."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    lines = [
        f"- {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC, "
        f"`python benchmarks/best_rows.py`, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        f"- medians of {ROUNDS} commits; {CLIENTS:,} clients, {COHORT} a round",
        "",
        "| a client's state | clients | best round | ms | MB written |",
        "|---|---|---|---:|---:|",
    ]
    for scalars in (2_500, 25_000):
        for trained in (False, True):
            for best in (False, True):
                took, wrote = measure(scalars, trained=trained, best=best)
                who, kept = "trained" if trained else "new", "kept" if best else "none"
                size = f"{scalars * 4 // 1000} kB"
                lines.append(f"| {size} | {who} | {kept} | {took:.1f} | {wrote:.2f} |")
    text = "\n".join(lines) + "\n"
    print(text)
    OUT.write_text(f"# Keeping the private states of the best round\n\n{text}")


if __name__ == "__main__":
    main()
